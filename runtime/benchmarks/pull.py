"""Measures what pages of another server are worth: the time to the first token of a long prompt, pulled or computed.

    python runtime/benchmarks/pull.py --shape tiny

Two servers on this machine with the same random weights. In each round the first one computes a new prompt of 4,096
tokens; the second one then gets it with the first one's address, and another new prompt without, in turns. Both answers
to a prompt must be equal. Prints a row of JSON for each figure:

- `pull.ttft_ratio`: median time to the first token of pulled prompts ÷ computed ones.
- `pull.ttft_ms.pulled`, `pull.ttft_ms.computed`: the two.
- `pull.cached_share`: prompt tokens that were not computed, of pulled prompts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dummy_model import write_model
from engine import SHAPES, report
from server import serving

PROMPT, ANSWER, UNCOUNTED = 4096, 4, 1


def ask(port: int, prompt: list[int], pages_from: str | None = None) -> tuple[float, list[int], int]:
    """Returns milliseconds to the first token, the answer, and the cached prompt tokens."""
    params = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began = time.perf_counter()
    connection.request("POST", "/generate", body, {} if pages_from is None else {"x-treeline-pages-from": pages_from})
    answer = connection.getresponse()
    events = [answer.readline()]
    first = time.perf_counter() - began
    events += answer.read().splitlines()
    assert answer.status == 200, events
    found: dict[str, Any] = json.loads([line for line in events if line.startswith(b"data: {")][-1][6:])
    return 1e3 * first, found["output_ids"], found["meta_info"]["cached_tokens"]


def pages_at(port: int) -> str:
    """Where the server at this port gives pages to others."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/server_info")
    return f"127.0.0.1:{json.load(connection.getresponse())['kv_transfer_port']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--quick", action="store_true", help="few rounds: proves that it works")
    args = parser.parse_args()
    rng, pulled, computed, cached = random.Random(0), list[float](), list[float](), 0
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        models = [Path(first), Path(second)]
        for model in models:
            write_model(model, args.shape)
        settings = {"host_cache": "1GiB", "kv_transfer_port": 0}
        with (
            serving(models[0], settings, "treeline_runtime", {}) as source,
            serving(models[1], settings, "treeline_runtime", {}) as server,
        ):
            address = pages_at(source.port)
            for turn in range(UNCOUNTED + (1 if args.quick else 6)):
                prompt, other = (rng.choices(range(10, 4000), k=PROMPT + 1) for _ in range(2))
                _, expected, _ = ask(source.port, prompt)
                found = {}
                for pulls in (True, False) if turn % 2 else (False, True):
                    found[pulls] = ask(server.port, *((prompt, address) if pulls else (other,)))
                assert found[True][1] == expected, "the answers differ"
                if turn >= UNCOUNTED:
                    pulled.append(found[True][0])
                    computed.append(found[False][0])
                    cached += found[True][2]
    report("pull.ttft_ms.pulled", statistics.median(pulled))
    report("pull.ttft_ms.computed", statistics.median(computed))
    report("pull.ttft_ratio", statistics.median(pulled) / statistics.median(computed))
    report("pull.cached_share", cached / (len(pulled) * (PROMPT + 1)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
