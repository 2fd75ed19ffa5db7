"""Our own picker, started by the command line, and some of the cases; CI runs all (`make conformance ARGS=--ours`)."""

from __future__ import annotations

import sys

import pytest
from treeline_conformance.command import main

PORTS = "--grpc-port {port} --grpc-health-port {health_port} --metrics-port {metrics_port} --admin-port {admin_port}"
POOL = "--pool-name {pool} --pool-namespace {namespace} --secure-serving=false"
PODS = "--endpoint a={pod0} --endpoint b={pod1} --endpoint c={pod2}"


@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize(
    ("source", "cases"),
    [
        (POOL, ("P6", "P9", "P10", "P14", "pods.ports", "rules.rewrite-object", "end")),
        (PODS, ("P4", "P7", "modes", "errors.no-grpc-status", "responses.events")),
    ],
)
def test_our_picker_keeps_the_protocol(source: str, cases: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    command = f"ours={sys.executable} -m treeline_epp {source} {PORTS}"
    status = main(["--start", command, "--only", *cases, "--timeout", "10"])
    said = capfd.readouterr()
    assert status == 0, said.err
    assert "| ours |" in said.out
