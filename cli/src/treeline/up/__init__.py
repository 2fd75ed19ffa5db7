"""`treeline up`: a model served on this machine, through a real Envoy and the endpoint picker."""
