"""The engine model: a paged cache, a scheduler and a simulated clock. Pure: no sockets, no threads.

`Engine` is driven from outside: `submit` a request, read `ends_at`, call `advance` at that time. A simulation does that
from its event queue, the engine behind sockets from asyncio's.
"""
