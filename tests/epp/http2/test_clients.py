"""Clients of other libraries (grpc-go, tonic) against `treeline pick`, and the reading of h2spec's report."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from support.h2spec import EXPLAINED, Outcome, outcomes, page, unexplained
from support.http2_clients import CLIENTS, Missing, pickers, program, tried

SHORT = ["picks", "body", "cancel", "tls", "goaway"]
"""keepalive takes a minute (`make http2-clients`)."""


@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_of_another_library_finds_no_fault_and_detects_a_wrong_endpoint(
    name: str, tmp_path: Path
) -> None:
    try:
        client = program(name)
    except Missing as missing:
        pytest.skip(str(missing))
    said: list[str] = []
    async with pickers(tmp_path) as asked:
        status = await tried(client, asked, ["--only", ",".join(SHORT)], said.append)
        assert (status, [line.partition(":")[0] for line in said]) == (0, [f"ok {check}" for check in SHORT]), said
        said.clear()
        status = await tried(client, asked, ["--only", "body", "--endpoints", "127.0.0.1:1"], said.append)
        assert status == 1
        assert "is no endpoint" in said[0]


REPORT = """<testsuites><testsuite>
<testcase package="http2/5.1" classname="idle"></testcase>
<testcase package="http2/5.1" classname="closed"><error>GOAWAY Frame
Connection closed
Timeout</error></testcase>
<testcase package="generic/5" classname="Sends a dynamic table size update"><error>HEADERS Frame
Connection closed</error></testcase>
</testsuite></testsuites>"""


def test_a_case_of_h2spec_that_fails_must_be_explained() -> None:
    cases = outcomes(REPORT)
    assert cases[0] == Outcome("http2/5.1", "idle", "")
    assert unexplained(cases) == [Outcome("http2/5.1", "closed", "Timeout")]
    text = page(cases, "h2spec v1", datetime.date(2026, 1, 2))
    assert "**1 of 3 cases pass.**" in text
    assert "| http2/5.1 | closed | Timeout | **not known** |" in text
    assert f"| Connection closed | {EXPLAINED['generic/5', 'Sends a dynamic table size update']} |" in text
    assert "| http2/5.1 | 2 | 1 |" in text
