"""One adapter for each type of engine: which of its pages to ask, and how to read them."""
