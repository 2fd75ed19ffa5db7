"""Other routers over the same simulated engines, behind sockets and in real time: `routing-sim --peers`."""
