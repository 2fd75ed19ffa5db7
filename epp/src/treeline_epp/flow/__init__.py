"""Flow control: which requests wait in the picker, in which order they go on, and how long they may wait."""
