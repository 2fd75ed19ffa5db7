from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from treeline_operator.operate import main, parser
from treeline_operator.world import PROMETHEUS


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "--namespace",
        "--no-leader-elect",
        "/healthz",
        "$KUBECONFIG",
        "treeline operate plan -f",
        "CRDs",
    ):
        assert word in text, word


@pytest.mark.parametrize(
    "argv",
    [
        ["--resync-seconds", "0"],
        ["--resync-seconds", "nan"],
        ["--api-server-port", "0"],
        ["--namespace", "a/b"],
        ["--namespace", ""],
        ["--health-port", "70000"],
        ["--log-level", "loud"],
        ["--lease-name"],
        ["plann"],
    ],
)
def test_a_wrong_command_line_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [
            "--host",
            "127.0.0.1",
            "--health-port",
            "0",
            "--metrics-port",
            str(port),
            "--log-format",
            "text",
        ]
        assert main(argv) == 1
    text = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in text
    assert "choose another with --metrics-port" in text
    assert "Traceback" not in text


NO_CERTIFICATE = """\
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {client-certificate-data: "!!!"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "there is no file"),
        (b"", "it is not a kubeconfig"),
        (b"- a list", "it is not a kubeconfig"),
        (b"a: [", "while parsing"),
        (b"\xff\xfe", "can't decode"),
        (b"kind: Config", "current-context"),
        (NO_CERTIFICATE.encode(), "PEM"),
    ],
)
def test_without_a_cluster_the_operator_says_so_in_one_line(
    content: bytes | None, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config"
    if content is not None:
        file.write_bytes(content)
    argv = ["--host", "127.0.0.1", "--health-port", "0", "--metrics-port", "0", "--log-format", "text"]
    assert main([*argv, "--kubeconfig", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert "--kubeconfig" in line
    assert str(file) in line


def test_the_defaults_equal_the_documented_ones() -> None:
    given = parser().parse_args([])
    assert (given.health_port, given.metrics_port, given.resync_seconds) == (8081, 9090, 300.0)
    assert given.host == "127.0.0.1"
    assert given.leader_elect
    assert given.namespace == []
    assert given.image_pull_secret == []


def test_registry_credentials_may_be_several() -> None:
    given = parser().parse_args(["--image-pull-secret", "a", "--image-pull-secret=b"])
    assert given.image_pull_secret == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("monitoring", "not JSON"),
        ("{}", "not a list"),
        ("null", "not a list"),
        ("[{}]", "{} is no NetworkPolicy peer"),
        ('["monitoring"]', "is no NetworkPolicy peer"),
        ('[{"namespace": {}}]', "it has ipBlock, namespaceSelector, podSelector"),
        ('[{"podSelector": "prometheus"}]', "its fields are objects"),
    ],
)
def test_readers_of_metrics_that_are_no_peers_are_refused(
    text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["--metrics-from", text])
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--metrics-from", "--epp-template", "--edge-template", "--presets"])
@pytest.mark.parametrize("depth", [101, 100_000])
def test_json_that_is_nested_deep_is_refused(flag: str, depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args([flag, '{"spec":' * depth + "{}" + "}" * depth])
    assert end.value.code == 2
    assert re.search("nested more than 100 deep|recursion depth", capsys.readouterr().err)


def test_metrics_readers_can_be_chosen_or_none() -> None:
    assert parser().parse_args([]).metrics_from == PROMETHEUS
    assert parser().parse_args(["--metrics-from", "[]"]).metrics_from == ()
    peer = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "x"}}}
    assert parser().parse_args([f"--metrics-from={json.dumps([peer])}"]).metrics_from == (peer,)
