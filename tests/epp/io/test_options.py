"""The command line: sources of endpoints, flags of other pickers, and what is refused with which words."""

from __future__ import annotations

import pytest
from treeline_epp.endpoints.model_server_metrics import Metric, MetricNames
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


def test_without_kubernetes_it_binds_to_loopback_in_plain_text() -> None:
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


def test_a_proxy_that_is_not_ours_gets_one_endpoint_unless_told_otherwise() -> None:
    assert options_of(["--gateway", "g"]).fallback_endpoints == 1
    assert options_of(["--gateway", "g", "--secure-serving"]).fallback_endpoints == 0
    assert options_of(["--pool-name", "p"]).fallback_endpoints == 0
    assert options_of(["--pool-name", "p", "--fallback-endpoints", "2"]).fallback_endpoints == 2


def test_what_runtimes_tell_the_picker_is_kept_from_clients_of_a_proxy_that_is_not_ours() -> None:
    assert options_of(["--gateway", "g"]).expose_routing
    assert not options_of(["--gateway", "g", "--secure-serving"]).expose_routing
    assert options_of(["--gateway", "g", "--secure-serving", "--expose-routing"]).expose_routing


def test_the_command_line_of_the_reference_picker_works_as_it_is() -> None:
    words = "--pool-name p --pool-namespace ns --zap-encoder json --grpc-port 9002 --grpc-health-port 9003"
    options = options_of(words.split())
    assert scope(options) == ("", "inference.networking.k8s.io", "p", "ns")
    assert options.secure_serving, "gateways speak TLS to such pickers"
    assert options.ignored == (), "logs are JSON here, too"
    words = (
        "--pool-name=p --pool-group=inference.networking.k8s.io --secure-serving=false --health-checking=true "
        "--zap-devel --zap-log-level=info --zap-stacktrace-level error --zap-time-encoding iso8601 -v=4 --v 5 "
        "--tracing=false --enable-pprof=false --metrics-endpoint-auth=false --metrics-port=9090"
    )
    options = options_of(words.split())
    assert options.pool_group == "inference.networking.k8s.io"
    assert (options.secure_serving, options.health_checking) == (False, True)
    assert options.log_level == "debug", "-v=5"
    assert [sentence.partition(":")[0] for sentence in options.ignored] == ["--zap-devel", "--zap-stacktrace-level"]
    assert not options_of(["--pool-name", "p", "--pool-group", "treeline.dev"]).secure_serving
    options = options_of(["--endpoint-selector", "app=vllm,env=prod", "--endpoint-target-ports", "3000,3001"])
    assert (options.endpoint_selector, options.endpoint_target_ports) == (
        {"app": "vllm", "env": "prod"},
        (3000, 3001),
    )


def test_the_flags_by_which_other_pickers_name_metrics_are_understood() -> None:
    words = [
        "--endpoint=a=127.0.0.1:1",
        "--total-queued-requests-metric=sglang:num_queue_reqs",
        "--total-running-requests-metric",
        "nv_trt_llm_request_metrics{request_type=scheduled}",
        "--kv-cache-usage-percentage-metric",
        "sglang:token_usage",
        "--cache-info-metric=",
        "--lora-info-metric=",
        "--refresh-metrics-interval=50ms",
        "--model-server-metrics-port=9100",
        "--model-server-metrics-path=/m",
        "--model-server-metrics-scheme=http",
        "--model-server-metrics-https-insecure-skip-verify=true",
    ]
    options = options_of(words)
    assert options.metric_names == MetricNames(
        waiting=(Metric("sglang:num_queue_reqs"),),
        running=(Metric("nv_trt_llm_request_metrics", {"request_type": "scheduled"}),),
        kv_usage=(Metric("sglang:token_usage"),),
    )
    assert (options.model_server_metrics_path, options.model_server_metrics_port) == ("/m", 9100)
    told = [sentence.partition(":")[0] for sentence in options.ignored]
    assert told == ["--refresh-metrics-interval", "--model-server-metrics-https-insecure-skip-verify"]
    assert options_of(["--gateway", "g", "--total-queued-requests-metric", ""]).metric_names is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "no endpoints"),
        ("--gateway g --total-queued-requests-metric a{b", "neither a metric's name nor of the form"),
        ("--gateway g --model-server-metrics-path metrics", "is no path: it begins with a slash"),
        ("--gateway g --model-server-metrics-port 0", "--model-server-metrics-port: must be at least 1"),
        ("--kubernetes", "--kubernetes needs --gateway NAME"),
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
        (
            "--gateway g --fallback-endpoints 4",
            "--fallback-endpoints: must be at least 0 and at most 3, got 4",
        ),
        ("--gateway g --drain-timeout soon", "--drain-timeout: expected seconds, got 'soon'"),
        ("--gateway g --grpc-port 65536", "--grpc-port: must be at least 0 and at most 65535, got 65536"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
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


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--flow-wait-seconds 2", "--flow-wait-seconds needs --flow-control wait"),
        ("--flow-wait-seconds 2 --flow-control requests", "--flow-wait-seconds needs --flow-control wait"),
        ("--flow-endpoint-requests 5", "--flow-endpoint-requests needs --flow-control requests"),
        ("--flow-endpoint-requests 5 --flow-control wait", "--flow-endpoint-requests needs --flow-control requests"),
        ("--flow-ttl-seconds 60", "--flow-ttl-seconds needs --flow-control wait or requests"),
        (
            "--flow-ttl-seconds 9 --hold-empty-pool-seconds 9",
            "--flow-ttl-seconds needs --flow-control wait or requests",
        ),
        ("--flow-max-requests 5000", "needs --flow-control wait or requests, or --hold-empty-pool-seconds"),
        (
            "--flow-max-bytes=1 --flow-control=off",
            "needs --flow-control wait or requests, or --hold-empty-pool-seconds",
        ),
    ],
)
def test_flags_of_flow_control_that_would_change_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], words: str, needed: str
) -> None:
    assert needed in refused(capsys, "--gateway", "g", *words.split())


def test_flags_of_flow_control_are_taken_where_they_mean_something() -> None:
    bounds = ["--flow-max-requests", "7", "--flow-max-bytes", "9"]
    for words in (
        ["--flow-control", "wait", "--flow-wait-seconds", "2", "--flow-ttl-seconds", "3", *bounds],
        ["--flow-control", "requests", "--flow-endpoint-requests", "2", "--flow-ttl-seconds", "3", *bounds],
        ["--hold-empty-pool-seconds", "4", *bounds],
    ):
        options = options_of(["--gateway", "g", *words])
        assert (options.flow_max_requests, options.flow_max_bytes) == (7, 9)
