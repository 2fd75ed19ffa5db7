"""One adapter for each type of engine: whom to ask what."""
