"""Attacks on the whole path: raw HTTP/1.1 and HTTP/2 to a real Envoy, with the picker and runtimes behind it."""
