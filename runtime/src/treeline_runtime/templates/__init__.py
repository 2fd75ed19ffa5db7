"""Chat templates that only a worker process may render: the pool of workers, and the worker itself."""
