"""The load client: raw HTTP/1.1 over keep-alive connections, one request at a time on each, in a process of its own."""
