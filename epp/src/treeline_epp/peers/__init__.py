"""Several pickers of one pool: each tells the others of its requests in flight, so that their scores agree."""
