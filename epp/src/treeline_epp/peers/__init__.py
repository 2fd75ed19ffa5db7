"""Several pickers of one pool: each sends its requests in flight to the others, so that their scores agree."""
