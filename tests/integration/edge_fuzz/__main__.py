"""`python -m tests.integration.edge_fuzz`: attack Envoy, the picker and two runtimes of the tiny model on this machine.

--seconds 60     how long the attack takes, and the quiet time that it is compared with
--rate 8         connections a second; more of them and the models that compute on the same cores are what is measured
--seed 0         another seed, other attacks
--number N       make one attack alone, by the number that a finding named, and print what came back
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import httpx

TESTS = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int)
    options = parser.parse_args()
    say = sys.stdout.write
    with tempfile.TemporaryDirectory() as folder, running_stack(Path(folder)) as stack:
        if options.number is not None:
            made, url = of_number(options.seed, options.number), httpx.URL(stack.url)
            say(f"{made.name}, {sum(map(len, made.sends))} bytes, then {made.end}: {b''.join(made.sends)[:600]!r}\n")
            for answer in asyncio.run(perform(made, url.host, url.port or 80)):
                say(f"{answer.status}: {answer.text!r}\n")
            return 0
        say(f"attacking {stack.url} for {options.seconds:g} s; the same time in quiet first\n")
        report = run(stack, seed=options.seed, seconds=options.seconds, rate=options.rate)
        seen = report.attacked
        say(
            f"{seen.attacks} connections: {dict(seen.kinds.most_common())}\n"
            f"answers: {dict(sorted(seen.statuses.items()))}\n"
        )
        for name, was in report.before.items():
            now = report.after[name]
            say(f"{name}: {was.rss_bytes >> 20} → {now.rss_bytes >> 20} MiB, {was.files} → {now.files} files\n")
        say(
            f"the other client: p99 {p99(report.quiet_s) * 1e3:.1f} ms quiet, "
            f"{p99(report.beside_s) * 1e3:.1f} ms beside the attack, "
            f"ratio {report.p99_ratio:.2f} of {len(report.beside_s)} requests each\n"
        )
        wrong = [*seen.defects, *(f"the other client: {text}" for text in report.failures), *report.grown]
        if report.p99_ratio > 2:
            wrong.append(f"the other client's p99 is {report.p99_ratio:.2f} times that of a quiet time")
        for line in wrong[:40]:
            say(f"NOT HELD: {line}\n")
        say(f"{len(wrong)} findings\n" if wrong else "held: no 5xx of ours, no growth, others served as before\n")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    from support.stack import running_stack

    from tests.integration.edge_fuzz.run import of_number, p99, perform, run

    sys.exit(main())
