"""Flow control: the requests that wait in the picker, their order, and the longest wait."""
