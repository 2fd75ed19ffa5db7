"""The load client as a process: `python -m treeline_bench.client PLAN REPORT`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import msgspec
import uvloop

from treeline_bench.client.load import carry_out
from treeline_bench.client.messages import Plan


def main(plan_path: str, report_path: str) -> None:
    plan = msgspec.msgpack.decode(Path(plan_path).read_bytes(), type=Plan)
    # A collection of the whole heap in the middle of a run would be measured as the server's latency.
    gc.collect()
    gc.freeze()
    gc.disable()
    report = uvloop.run(carry_out(plan))
    Path(report_path).write_bytes(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
