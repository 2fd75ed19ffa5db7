"""A server's end of HTTP/2 and gRPC without I/O: bytes in, events out; calls in, bytes out."""
