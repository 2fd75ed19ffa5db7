"""The engine model: a paged cache, a scheduler and a clock of its own. Pure: no sockets, no threads.

`Engine` is driven from outside: `submit` a request, look at `ends_at`, call `advance` then. A simulation does that from
its event queue, the engine behind sockets from asyncio's.
"""
