"""`routing-sim --peers`: other routers over the same simulated engines, behind sockets in real time."""
