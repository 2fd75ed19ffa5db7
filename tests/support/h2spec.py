"""Runs h2spec against `treeline pick`: how many of its cases pass, and why the others do not.

make h2spec ARGS="--out bench/results"
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import re
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from treeline_bench.context import ROOT

from support.http2_clients import built, pickers

_TIMEOUT_S: Final = 5
_PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

_NO_TABLE: Final = (
    "The picker says SETTINGS_HEADER_TABLE_SIZE 0, which h2spec acknowledges and then exceeds (128 and 4096 bytes). By "
    "RFC 7541, section 6.3, that is a decoding error. Without a table a block of fields always means the same, and is "
    "decoded once."
)
_ENDED: Final = (
    "Now and then: h2spec's GET is no gRPC, so it is answered at once (415) and reset with NO_ERROR, as RFC 9113, "
    "section 8.1, allows. What comes behind that is ignored (section 5.1), and h2spec waits for a second reset."
)
EXPLAINED: Final[dict[tuple[str, str], str]] = {
    ("generic/5", "Sends a dynamic table size update"): _NO_TABLE,
    ("generic/5", "Sends multiple dynamic table size update"): _NO_TABLE,
    ("http2/8.1", "Sends a second HEADERS frame without the END_STREAM flag"): _ENDED,
}
"""(section, case) → why it may fail."""


@dataclass(frozen=True)
class Outcome:
    """One case: its section (`http2/5.1`) and name. `seen`: the wrong response; empty if the case passes."""

    section: str
    case: str
    seen: str


def outcomes(report: str) -> list[Outcome]:
    """Read the outcomes from h2spec's report (JUnit's XML)."""
    found = []
    for case in ET.fromstring(report).iter("testcase"):
        fault = next(iter(case), None)
        seen = "" if fault is None else (fault.text or "").strip().rpartition("\n")[2] or fault.tag
        found.append(Outcome(case.get("package", ""), case.get("classname", ""), seen))
    return found


def unexplained(cases: Sequence[Outcome]) -> list[Outcome]:
    """List the failures that no entry of EXPLAINED covers."""
    return [one for one in cases if one.seen and (one.section, one.case) not in EXPLAINED]


def page(cases: Sequence[Outcome], version: str, day: datetime.date) -> str:
    """Return the text of bench/results/h2spec.md."""
    missed = [one for one in cases if one.seen]
    lines = [
        "# h2spec",
        "",
        f"{day.isoformat()}, `make h2spec`: {version} with `--strict --timeout {_TIMEOUT_S}` against the ext_proc port "
        "of `treeline pick`.",
        "",
        f"**{len(cases) - len(missed)} of {len(cases)} cases pass.**",
    ]
    if missed:
        lines += ["", "| section | case that fails | seen | why |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {one.section} | {one.case} | {one.seen} | {EXPLAINED.get((one.section, one.case), '**not known**')} |"
            for one in missed
        ]
    lines += ["", "| section | cases | pass |", "| --- | --- | --- |"]
    for section in dict.fromkeys(one.section for one in cases):
        of_it = [one for one in cases if one.section == section]
        lines.append(f"| {section} | {len(of_it)} | {sum(not one.seen for one in of_it)} |")
    return "\n".join(lines) + "\n"


async def examined(h2spec: Path) -> list[Outcome]:
    """Run every case against a picker of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.xml"
        async with pickers(folder) as running:
            flags = ["--strict", "--timeout", str(_TIMEOUT_S), "--path", _PATH, "--junit-report", str(report)]
            asking = await asyncio.create_subprocess_exec(
                str(h2spec), "--host", "127.0.0.1", "--port", str(running.plain.port), *flags
            )
            await asking.wait()  # its status is 1 where any case fails
        return outcomes(report.read_text())


def _version() -> str:
    """Return h2spec's version; its own output gives an old one."""
    required = re.search(r"summerwind/h2spec (v[0-9.]+)", (ROOT / "tests/http2_clients/h2spec/go.mod").read_text())
    assert required is not None
    return f"h2spec {required[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="a folder for h2spec.md")
    options = parser.parse_args()
    h2spec = built("h2spec")
    cases = asyncio.run(examined(h2spec))
    text = page(cases, _version(), datetime.datetime.now(datetime.UTC).date())
    if options.out is not None:
        (options.out / "h2spec.md").write_text(text)
    sys.stdout.write(text)
    return 1 if unexplained(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
