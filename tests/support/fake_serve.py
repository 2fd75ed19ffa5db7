"""`treeline serve` with the fake scheduler: `python -m support.fake_serve --model …`. With LOOP_WATCH=FILE it records
there how long its event loop was held (support.loop_watch). STOP_S=SECONDS is the time for children to end by
themselves."""

import asyncio
import os
import sys
from pathlib import Path

from treeline_runtime import command, processes, serve

from support.loop_watch import watch


class WatchedServer(serve.Server):
    async def run(self) -> int:
        watching = asyncio.create_task(watch(Path(os.environ["LOOP_WATCH"])))
        try:
            return await super().run()
        finally:
            watching.cancel()


if __name__ == "__main__":
    processes.MODULES["scheduler"] = "support.fake_scheduler"
    processes.STOP_S = float(os.environ.get("STOP_S", processes.STOP_S))
    if "FAKE_ITEMS" in os.environ:  # a model of images, whatever its config.json says
        serve.check_before_loading = lambda *_: None  # type: ignore[assignment]
    if "MEDIA_LIBRARIES_HIDDEN" in os.environ:
        sys.modules |= dict.fromkeys(("transformers", "PIL"))  # type: ignore[arg-type]
    if "LOOP_WATCH" in os.environ:
        serve.Server = WatchedServer  # type: ignore[misc]
    sys.exit(command.main())
