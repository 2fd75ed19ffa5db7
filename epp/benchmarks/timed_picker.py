"""The picker, with a record of the delay from an engine's batch of KV events to the tree.

    python epp/benchmarks/timed_picker.py FILE [flags of the picker]

At its end, it writes to FILE a line of JSON for each live batch that was applied at once: `pod`, `seq`, `events`, `at`
(seconds since the epoch) and `delay_ms`, since the time stamp that the engine wrote into the batch. That is the
engine's clock: measure on one machine.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from treeline_epp.command import main
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_wire.events import EventBatch
from treeline_wire.frames import Request

_lines: list[dict[str, object]] = []
_on_live = KvSubscription.on_live


def _timed(self: KvSubscription, seq: int, batch: EventBatch | None, now: float) -> list[Request]:
    asked = _on_live(self, seq, batch, now)
    if batch is not None and self.live and self.next_seq == seq + 1:
        at = time.time()
        line = {"pod": str(self.pod), "seq": seq, "events": len(batch.events), "at": at}
        _lines.append(line | {"delay_ms": round(1e3 * (at - batch.ts), 3)})
    return asked


if __name__ == "__main__":
    KvSubscription.on_live = _timed  # type: ignore[method-assign]
    try:
        status = main(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in _lines))
    sys.exit(status)
