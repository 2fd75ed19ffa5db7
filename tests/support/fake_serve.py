"""`treeline serve` with the fake scheduler: `python -m support.fake_serve --model …`.

With LOOP_WATCH=FILE it notes there how long its event loop was held (support.loop_watch).
"""

import asyncio
import os
import sys
from pathlib import Path

from treeline_runtime import launch, serve

from support.loop_watch import watch


class WatchedServer(serve.Server):
    async def run(self) -> int:
        watching = asyncio.create_task(watch(Path(os.environ["LOOP_WATCH"])))
        try:
            return await super().run()
        finally:
            watching.cancel()


if __name__ == "__main__":
    launch.MODULES["scheduler"] = "support.fake_scheduler"
    if "LOOP_WATCH" in os.environ:
        serve.Server = WatchedServer  # type: ignore[misc]
    sys.exit(serve.main())
