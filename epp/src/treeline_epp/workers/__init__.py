"""Several processes that share the ext_proc port of one picker, and the one that looks after them."""
