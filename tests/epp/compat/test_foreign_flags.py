"""Flags of other endpoint pickers: accepted, reported as without effect, or refused with an alternative."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from treeline_epp.compat.flags import FOREIGN, REFUSED, seconds
from treeline_epp.options import Options, options_of, parser

PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"

LWEPP = (
    "--grpc-port 9002 --grpc-health-port 9003 --pool-group inference.networking.k8s.io --pool-namespace ns "
    "--pool-name p --metrics-port 9090 --endpoint-target-ports 3000,3001,3000 --health-checking --secure-serving "
    "--zap-devel --zap-encoder console --zap-log-level 5 --zap-stacktrace-level error --zap-time-encoding epoch"
)
GIE_1_5 = (
    "--grpc-port=9002 --ha-enable-leader-election=true --pool-group=inference.networking.k8s.io --pool-namespace=ns "
    "--pool-name=p --disable-endpoint-subset-filter=true --model-server-metrics-scheme=http "
    "--model-server-metrics-path=/metrics --model-server-metrics-port=8000 "
    "--model-server-metrics-https-insecure-skip-verify --refresh-metrics-interval=50ms "
    "--refresh-prometheus-metrics-interval=5s --metrics-staleness-threshold=2s "
    "--total-queued-requests-metric=vllm:num_requests_waiting "
    "--total-running-requests-metric=vllm:num_requests_running "
    "--kv-cache-usage-percentage-metric=vllm:kv_cache_usage_perc --lora-info-metric=vllm:lora_requests_info "
    "--cache-info-metric=vllm:cache_config_info -v=2 --tracing=false --health-checking=true --metrics-port=9090 "
    "--grpc-health-port=9003 --enable-pprof=true --cert-path=/certs --enable-cert-reload=true --secure-serving=true "
    "--metrics-endpoint-auth=true"
)
LLMD = "--drain-timeout 1m30s --grpc-max-recv-msg-size 25MB --grpc-max-send-msg-size 10MiB --emit-endpoint-scores=true"


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def told(options: Options) -> list[str]:
    (sentence,) = options.ignored
    return sentence.removeprefix("flags without effect: ").partition(";")[0].split(", ")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        options_of(argv)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_every_flag_of_the_reference_picker_is_accepted() -> None:
    options = options_of(LWEPP.split())
    assert (options.pool_name, options.pool_namespace, options.endpoint_target_ports) == ("p", "ns", (3000, 3001))
    assert (options.secure_serving, options.log_level) == (True, "debug")
    assert told(options) == ["--zap-devel", "--zap-encoder", "--zap-stacktrace-level", "--zap-time-encoding"]


def test_every_flag_of_gie_1_5_is_accepted_and_those_without_effect_are_reported() -> None:
    options = options_of(GIE_1_5.split())
    assert (options.cert_path, options.secure_serving) == (Path("/certs"), True)
    assert set(told(options)) == {flag for flag in FOREIGN if flag in GIE_1_5}
    assert len(told(options)) == 16


def test_flags_for_default_behaviour_are_not_reported() -> None:
    assert options_of(["--pool-name", "p", "--kubernetes", "--health-checking=true", "--tracing=false"]).ignored == ()


def test_durations_are_understood_as_go_writes_them() -> None:
    options = options_of(["--gateway", "g", *LLMD.split()])
    assert options.drain_timeout == 90.0
    assert told(options) == ["--emit-endpoint-scores", "--grpc-max-recv-msg-size", "--grpc-max-send-msg-size"]


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("-v 2", "info"),
        ("-v4", "debug"),
        ("--zap-log-level debug", "debug"),
        ("--zap-log-level=error", "error"),
        ("-v 5 --log-level warning", "warning"),
        ("", "info"),
    ],
)
def test_a_verbosity_becomes_a_log_level_unless_there_is_one(words: str, level: str) -> None:
    assert options_of(["--gateway", "g", *words.split()]).log_level == level


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_that_would_change_behaviour_are_refused_by_name(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    said = " ".join(refused(capsys, "--gateway", "g", f"{flag}=anything").split())
    assert flag in said
    as_here, why = REFUSED[flag]
    assert why in said
    for value in as_here.split():
        assert options_of(["--gateway", "g", f"{flag}={value}"]).ignored == (), "it is so here"


@pytest.mark.parametrize("words", ["--zap-log-level=loud", "-v=-1", "--tracing=perhaps"])
def test_an_invalid_value_is_refused(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert "neither" in refused(capsys, "--gateway", "g", words)


def test_no_foreign_flag_hides_one_of_ours() -> None:
    ours = {text for action in parser()._actions if not action.dest.startswith("--") for text in action.option_strings}
    assert not ours & {*FOREIGN, *REFUSED}


def test_the_migration_page_lists_every_flag() -> None:
    rows = re.findall(
        r"^\| (`--.*?) \| (no effect|refused) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    fates = {flag.strip("`"): (fate, why) for flags, fate, why in rows for flag in flags.split(", ")}
    for flag in FOREIGN:
        assert fates[flag][0] == "no effect", flag
    for flag, (_, why) in REFUSED.items():
        assert fates[flag] == ("refused", why), flag


@pytest.mark.parametrize(
    ("text", "value"),
    [("30s", 30.0), ("1m30s", 90.0), ("500ms", 0.5), ("1.5h", 5400.0), ("2", 2.0), ("0", 0.0), (".5s", 0.5)],
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "soon", "30 s", "-1s", "-1", "inf", "nan", "1s2", "1d", "s", "1e400"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        seconds(text)
