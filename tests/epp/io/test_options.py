"""The command line: sources of endpoints, flags of other pickers, and the words of refusals."""

from __future__ import annotations

import pytest
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.options import Options, options_of


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        options_of(argv)
    assert end.value.code == 2
    return capsys.readouterr().err


def scope(options: Options) -> tuple[object, ...]:
    return (options.gateway, options.pool_group, options.pool_name, options.pool_namespace)


def test_without_kubernetes_the_picker_binds_to_loopback_in_plain_text() -> None:
    options = options_of(["--endpoint", "a=127.0.0.1:1"])
    assert (options.kubernetes, options.host, options.secure_serving) == (False, "127.0.0.1", False)


def test_a_namespace_that_cannot_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("My_Team", "a/b", "a-", "x" * 64):
        assert "is no namespace" in refused(capsys, "--gateway", "g", "--pool-namespace", name)


def test_a_gateway_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(["--kubernetes", "--gateway", "g"])
    assert scope(options) == ("g", "treeline.dev", "", "default")
    assert (options.kubernetes, options.secure_serving) == (True, False)
    assert options_of(["--gateway=g", "--secure-serving"]).secure_serving
    monkeypatch.setenv("NAMESPACE", "team")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    options = options_of(["--gateway", "g"])
    assert (options.pool_namespace, options.host) == ("team", "0.0.0.0")
    assert options_of(["--gateway", "g", "--pool-namespace", "x"]).pool_namespace == "x"


def test_our_own_proxy_is_recognised_by_the_flags() -> None:
    assert options_of(["--gateway", "g"]).own_proxy
    assert not options_of(["--gateway", "g", "--secure-serving"]).own_proxy
    assert not options_of(["--pool-name", "p"]).own_proxy
    mutual = ["--secure-serving", "--cert-path", "x", "--require-client-certificates"]
    assert not options_of(["--gateway", "g", *mutual]).own_proxy, "anybody's proxy may have a certificate"
    for ours in ("--max-client-requests=9", "--trust-edge"):
        assert options_of(["--gateway", "g", *mutual, ours]).own_proxy, "our own Envoy is believed about clients"
    assert not options_of(["--pool-name", "p", *mutual]).own_proxy


def test_a_pool_by_name_is_an_upstream_pool_with_tls() -> None:
    options = options_of(["--pool-name", "p", "--pool-namespace", "ns"])
    assert scope(options) == ("", "inference.networking.k8s.io", "p", "ns")
    assert options.secure_serving, "gateways speak TLS to such pickers"
    assert not options_of(["--pool-name=p", "--secure-serving=false"]).secure_serving
    assert not options_of(["--pool-name", "p", "--pool-group", "treeline.dev"]).secure_serving
    options = options_of(["--endpoint-selector", "app=vllm,env=prod", "--endpoint-target-ports", "3000,3001"])
    assert (options.endpoint_selector, options.endpoint_target_ports) == (
        {"app": "vllm", "env": "prod"},
        (3000, 3001),
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "no endpoints"),
        ("--kubernetes", "no endpoints"),
        ("--gateway g --flow-control often", "Invalid enum value"),
        ("--gateway g --flow-control wait:wait_seconds=0", "`float` > 0"),
        ("--gateway g --flow-control wait:seconds=1", "unknown field `seconds`"),
        ("--gateway g --pool-name p", "--gateway and --pool-name: give one of them"),
        ("--gateway g --endpoint a=127.0.0.1:1", "do not go together"),
        ("--endpoint-selector a=b", "needs --endpoint-target-ports"),
        ("--endpoint-selector a --endpoint-target-ports 1", "not of the form key=value"),
        ("--endpoint-selector a=b --endpoint-target-ports 0", "not a list of one to eight ports"),
        (
            "--endpoint-selector a=b --endpoint-target-ports 1,2,3,4,5,6,7,8,9",
            "not a list of one to eight ports",
        ),
        ("--pool-name p --pool-group other", "invalid choice"),
        ("--gateway g --secure-serving=perhaps", "neither true nor false"),
        ("--gateway g --secure-serving=false --cert-path x", "--cert-path needs --secure-serving"),
        ("--gateway g --max-ttft-seconds 0", "--max-ttft-seconds: must be above 0, got 0.0"),
        ("--gateway g --max-ttft-seconds nan", "--max-ttft-seconds: must be above 0, got nan"),
        ("--gateway g --max-body-bytes 1023", "--max-body-bytes: must be at least 1024, got 1023"),
        ("--gateway g --drain-timeout soon", "--drain-timeout: expected seconds, got 'soon'"),
        ("--endpoint nonsense", "NAME=HOST:PORT"),
        ("--endpoint a=1.2.3.4:1 --endpoint a=1.2.3.4:2", "more than once"),
        ("--gateway g --max-client-requests 0", "at least 1"),
        ("--gateway g --show-prompts", "--show-prompts needs --console"),
        ("--gateway g --require-client-certificates", "--cert-path"),
        ("--gateway g --grpc-port 65536", "--grpc-port: must be at least 0 and at most 65535, got 65536"),
    ],
)
def test_contradictory_flags_are_refused(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    assert told in refused(capsys, *words.split())


def test_a_policy_is_named_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    def policy(*argv: str) -> str:
        return options_of(["--endpoint", "a=127.0.0.1:1", *argv]).policy

    assert policy() == policy("--policy", "treeline") == "predicted_ttft"
    assert policy("--policy=prefix_hash:load_factor=2") == "prefix_hash:load_factor=2"
    said = refused(capsys, "--endpoint", "a=127.0.0.1:1", "--policy", "cache_aware:threshold=1")
    assert "it has cache_threshold, balance_abs_threshold, balance_rel_threshold" in said
    assert "valid: bucket, cache_aware" in refused(capsys, "--endpoint", "a=127.0.0.1:1", "--policy", "best")


def test_a_fairness_header_is_one_header(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_of(["--gateway", "g", "--fairness-header", "X-Team"]).fairness_header == "x-team"
    for name in ("", "x team", ":authority", "x-" + 63 * "a"):
        assert "is no name of a header" in refused(capsys, "--gateway", "g", "--fairness-header", name)
    assert "carries a secret" in refused(capsys, "--gateway", "g", "--fairness-header", "Authorization")


def test_flow_control_is_a_mode_with_parameters() -> None:
    words = "requests:endpoint_requests=2,max_requests=7,hold_empty_pool_seconds=4.5"
    flow = options_of(["--gateway", "g", "--flow-control", words]).flow_control
    assert flow == FlowSettings("requests", endpoint_requests=2, max_requests=7, hold_empty_pool_seconds=4.5)
    assert flow.saturation is not None
    assert not options_of(["--gateway", "g"]).flow_control.may_hold
