"""The generated Envoy bootstrap: the real Envoy accepts it, and it has the required settings."""

from __future__ import annotations

import json
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.envoy import self_signed, validate
from treeline_operator.envoy import EnvoyConfig, Tls, Tracing, bootstrap, bootstrap_json, command
from treeline_operator.envoy.config import Limits
from treeline_operator.envoy.keys import (
    FILTER,
    TYPE_URL,
    KeyFile,
    filter_settings,
    read_secret,
)
from treeline_wire import headers as names


def manager(config: EnvoyConfig) -> dict[str, Any]:
    """Return the HTTP connection manager of the gateway's listener."""
    listener = bootstrap(config)["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]  # type: ignore[no-any-return]


def cluster(config: EnvoyConfig, name: str) -> dict[str, Any]:
    (found,) = [c for c in bootstrap(config)["static_resources"]["clusters"] if c["name"] == name]
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.mark.deep
@pytest.mark.parametrize(
    "config",
    [
        EnvoyConfig(),
        EnvoyConfig(listen_host="::1", epp_host="::1"),
        EnvoyConfig(epp_host="epp.default.svc"),
        EnvoyConfig(api_keys={"ada": "sk-1"}, add_endpoint_header=True, expose_cached_tokens=True),
        EnvoyConfig(
            fail_open=False,
            request_body_mode="FULL_DUPLEX_STREAMED",
            response_body_mode="FULL_DUPLEX_STREAMED",
        ),
        EnvoyConfig(request_body_mode="STREAMED", response_body_mode="BUFFERED"),
        EnvoyConfig(request_body_mode="NONE", access_log=None),
        EnvoyConfig(tracing=Tracing("collector.observability.svc")),
        EnvoyConfig(console_port=9004),
        EnvoyConfig(
            console_port=9004,
            listen_host="0.0.0.0",
            api_keys={"ada": "sk-1"},
            limits=Limits(client_requests_per_s=10),
        ),
    ],
    ids=["default", "ipv6", "dns", "everything", "duplex", "streamed", "none", "traced", "console", "console, keys"],
)
def test_the_real_envoy_accepts_the_bootstrap(config: EnvoyConfig, tmp_path: Path) -> None:
    assert validate(config, tmp_path) == ""


@pytest.mark.deep
def test_the_real_envoy_accepts_tls(certificate: Tls, tmp_path: Path) -> None:
    assert validate(EnvoyConfig(tls=certificate), tmp_path) == ""


def test_keys_from_a_file_mean_the_same_as_keys_in_the_bootstrap() -> None:
    (inline,) = [f for f in manager(EnvoyConfig(api_keys={"ada": "sk-1"}))["http_filters"] if f["name"] == FILTER]
    assert inline["typed_config"] == {"@type": TYPE_URL, **filter_settings((("sk-1", "ada"),))}
    keyed = manager(EnvoyConfig(api_keys_file="/run/keys.json"))["http_filters"]
    (watched,) = [f for f in keyed if f["name"] == FILTER]
    assert watched["config_discovery"]["type_urls"] == [inline["typed_config"]["@type"]]


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.1", False)]
)
def test_console_requests_lose_the_edge_header_on_a_loopback_listener_only(host: str, local: bool) -> None:
    config = EnvoyConfig(console_port=9004, listen_host=host)
    routes = manager(config)["route_config"]["virtual_hosts"][0]["routes"]
    removed = [route.get("request_headers_to_remove", []) for route in routes]
    assert removed[0] == ([names.EDGE] if local else [])
    assert not any(names.EDGE in each for each in removed[1:]), "engines are told by all"
    sandboxed = [route for route in routes if "sandbox" in str(route.get("response_headers_to_add"))]
    assert len(sandboxed) == len([route for route in routes if route.get("route", {}).get("cluster") == "pods"]) > 5


def test_the_console_takes_few_connections_of_a_picker() -> None:
    (bounds,) = cluster(EnvoyConfig(console_port=9004), "console")["circuit_breakers"]["thresholds"]
    assert bounds == {"max_connections": 4, "max_pending_requests": 64}


def test_only_readiness_and_metrics_leave_the_admin_page() -> None:
    config = bootstrap(EnvoyConfig(listen_host="0.0.0.0", admin_port=9901, health_port=8081))
    gateway, health = config["static_resources"]["listeners"]
    assert (gateway["traffic_direction"], health.get("traffic_direction")) == ("INBOUND", None)
    http = health["filter_chains"][0]["filters"][0]["typed_config"]
    pages = http["route_config"]["virtual_hosts"][0]["routes"]
    assert [(p["match"].get("path"), p.get("route", {}).get("prefix_rewrite")) for p in pages] == [
        ("/ready", "/ready"),
        ("/metrics", "/stats/prometheus"),
        (None, None),
    ]


def test_a_mounted_secret_is_read_and_logged_without_its_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, file = tmp_path / "secret", tmp_path / "keys.json"
    (secret / "..data").mkdir(parents=True)
    for name, content in {
        "zoe": "sk-number-2\n\n sk-number-1 \n",
        "bob": "sk-number-1",
        "eve": " \n",
        ".hidden": "sk-number-3",
    }.items():
        (secret / name).write_text(content)
    assert read_secret(secret) == {"bob": ("sk-number-1",), "eve": (), "zoe": ("sk-number-2", "sk-number-1")}
    keys = KeyFile(secret, file)
    assert keys.refresh()
    (resource,) = json.loads(file.read_text())["resources"]
    assert resource["typed_config"]["credentials"] == [
        {"key": "sk-number-1", "client": "bob"},
        {"key": "sk-number-2", "client": "zoe"},
    ]
    assert "eve has no API key" in caplog.text
    assert "zoe has the same API key as client bob" in caplog.text
    assert "sk-" not in caplog.text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    caplog.clear()
    assert not keys.refresh()
    assert caplog.text == ""
    (secret / "bob").write_text("sk-number-4")
    assert keys.refresh()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "secret"]


BAD_KEYS = {
    "short": b"sk-1234",
    "two words": b"sk-first sk-second",
    "a letter that is not ASCII": "sk-schlüssel-1".encode(),
    "a control": b"sk-number\x0b-1",
    "half of the line ends of Unicode": b"sk-number-1\xc2\x85sk-number-2\xe2\x80\xa8sk-number-3\x1csk-number-4\x0csk",
    "nothing but what cannot be decoded": b"\xff" * 32,
}


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_an_invalid_key_line_is_refused_by_position_and_other_lines_still_work(
    bad: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "ada").write_bytes(b"sk-number-9\r\n\n" + BAD_KEYS[bad] + b"\n")
    (secret / "bob").write_bytes(BAD_KEYS[bad])
    keys = KeyFile(secret, tmp_path / "keys.json")
    assert keys.refresh()
    (resource,) = json.loads((tmp_path / "keys.json").read_text())["resources"]
    assert resource["typed_config"]["credentials"] == [{"key": "sk-number-9", "client": "ada"}]
    assert "file 'ada', line 3: refused: an API key is 8 or more printable ASCII characters" in caplog.text
    assert "client bob has no API key" in caplog.text
    assert "sk" not in caplog.text
    caplog.clear()
    assert not keys.refresh()
    assert caplog.text == "", "logged once, not at every read"


def test_a_binary_file_is_reported_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ada").write_bytes(b"\x00\n" * 1000)
    assert read_secret(tmp_path) == {"ada": ()}
    (record,) = caplog.records
    assert "line 1, 2, 3, 4, 5, ...: refused" in record.getMessage()


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=200), st.lists(st.binary(min_size=1, max_size=12)).map(b"\n".join)))
@example(b"\x85" * 8)
@example("k\u2028".encode() * 8)
def test_keys_of_any_file_are_whole_lines_of_printable_ascii(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ada").write_bytes(content)
        (keys,) = read_secret(Path(folder)).values()
    lines = [line.strip(b" \t\r") for line in content.split(b"\n")]
    for key in keys:
        assert len(key) >= 8
        assert set(key) <= {chr(code) for code in range(0x21, 0x7F)}
        assert key.encode() in lines


@pytest.mark.deep
def test_the_real_envoy_would_refuse_a_mistake(tmp_path: Path) -> None:
    assert "/nowhere.key" in validate(EnvoyConfig(tls=Tls("/nowhere.pem", "/nowhere.key")), tmp_path)


def test_the_bootstrap_is_plain_json_and_the_same_every_time() -> None:
    config = EnvoyConfig(api_keys={"ada": "sk-1"})
    assert json.loads(bootstrap_json(config)) == bootstrap(config) == bootstrap(EnvoyConfig(api_keys={"ada": "sk-1"}))


def test_the_first_filter_strips_headers_and_the_picker_comes_before_the_router() -> None:
    filters = manager(EnvoyConfig(api_keys={"ada": "sk-1"}))["http_filters"]
    assert [f["name"].removeprefix("envoy.filters.http.") for f in filters] == [
        "header_mutation",
        "header_to_metadata",
        "api_key_auth",
        "ext_proc",
        "rbac",
        "router",
    ]
    removed = filters[0]["typed_config"]["mutations"]["request_mutations"]
    prefixes = [m["remove_on_match"]["key_matcher"]["prefix"] for m in removed if "remove_on_match" in m]
    assert all(any(name.startswith(p) for p in prefixes) for name in (names.DESTINATION, names.SUBSET, names.SERVED))


def test_a_request_must_arrive_within_a_minute_and_its_answer_has_no_limit() -> None:
    http = manager(EnvoyConfig())
    route = http["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    (ext_proc,) = [f["typed_config"] for f in http["http_filters"] if f["name"].endswith("ext_proc")]
    assert route["timeout"] == "0s"
    assert (http["request_headers_timeout"], http["request_timeout"]) == ("10s", "60s")
    assert http["stream_idle_timeout"] == route["idle_timeout"] == ext_proc["max_message_timeout"] == "3600s"
    assert ext_proc["message_timeout"] == "1s"
    assert ext_proc["failure_mode_allow"] is True


def test_long_generations_do_not_trip_circuit_breakers() -> None:
    for name in ("pods", "ext_proc"):
        (limits,) = cluster(EnvoyConfig(), name)["circuit_breakers"]["thresholds"]
        assert min(limits[k] for k in ("max_connections", "max_pending_requests", "max_requests")) >= 40_000


def test_the_admin_page_is_on_loopback_even_if_the_listener_is_not() -> None:
    config = bootstrap(EnvoyConfig(listen_host="0.0.0.0", admin_port=9901))
    assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert "admin" not in bootstrap(EnvoyConfig(listen_host="0.0.0.0")), "it is not on the listener"


def test_the_access_log_has_no_query_no_body_and_no_other_header() -> None:
    line = manager(EnvoyConfig())["access_log"][0]["typed_config"]["log_format"]["json_format"]
    read = [value for value in line.values() if "REQ(" in value or "RESP(" in value]
    assert sorted(read) == sorted(
        [
            "%REQ(:METHOD)%",
            "%REQ(X-REQUEST-ID)%",
            f"%REQ({names.DESTINATION.upper()})%",
            f"%REQ({names.CLIENT.upper()})%",
        ]
    )
    assert line["path"] == "%PATH(NQ)%"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, None),
        ({"isolation": "Shared"}, None),
        ({"api_keys": {"ada": "sk"}}, names.PER_KEY),
        ({"api_keys_file": "/run/keys.json"}, names.PER_KEY),
        ({"api_keys": {"ada": "sk"}, "expose_cached_tokens": True}, names.PER_KEY),
        ({"api_keys": {"ada": "sk"}, "isolation": "Shared"}, names.SHARED),
        ({"api_keys": {"ada": "sk"}, "isolation": "Shared", "expose_cached_tokens": True}, None),
    ],
)
def test_the_edge_removes_isolation_headers_of_callers_and_sets_its_own(
    settings: dict[str, Any], word: str | None
) -> None:
    (edge, *_) = manager(EnvoyConfig(**settings))["http_filters"]
    changes = edge["typed_config"]["mutations"]["request_mutations"]
    removed = [at for at, change in enumerate(changes) if "remove_on_match" in change]
    told = {
        change["append"]["header"]["key"]: (at, change["append"]["header"]["value"])
        for at, change in enumerate(changes)
        if "append" in change
    }
    assert names.CLIENT not in told, "the filter that knows the keys says it"
    if word is None:
        assert names.ISOLATION not in told
    else:
        at, value = told[names.ISOLATION]
        assert value == word
        assert at > max(removed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_body_mode": "FULL_DUPLEX_STREAMED"}, "fail_open"),
        ({"body_limit": 10}, "bytes"),
        ({"engines": ()}, "treeline, vllm"),
        ({"engines": ("treeline", "tgi")}, "tgi"),
        ({"api_keys": {"ada": " "}}, "empty"),
        ({"api_keys": {"ada": "sk-1"}, "api_keys_file": "/run/keys.json"}, "not both"),
        ({"health_port": 8081}, "admin_port"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvoyConfig(**settings)


def test_the_command_line_bounds_the_drain() -> None:
    words = command("envoy", "c.json", concurrency=2, drain_s=7)
    assert words[words.index("--drain-time-s") + 1] == "7"
    assert words[words.index("--concurrency") + 1] == "2"


def test_spans_are_sent_only_to_a_configured_collector_and_request_ids_stay() -> None:
    assert "collector" not in bootstrap_json(EnvoyConfig())
    assert manager(EnvoyConfig()).keys().isdisjoint({"tracing", "request_id_extension"})
    traced = manager(EnvoyConfig(tracing=Tracing("::1", 4400, 0.25)))
    assert traced["tracing"]["random_sampling"] == {"value": 25.0}
    assert traced["request_id_extension"]["typed_config"]["pack_trace_reason"] is False
    collector = cluster(EnvoyConfig(tracing=Tracing("::1", 4400)), "collector")
    (lb,) = collector["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert lb["endpoint"]["address"]["socket_address"] == {"address": "::1", "port_value": 4400}
