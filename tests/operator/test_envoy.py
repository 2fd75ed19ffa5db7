"""The generated Envoy bootstrap: accepted by the real Envoy, and saying what it must."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.envoy import self_signed, validate
from treeline_operator.envoy import EnvoyConfig, Tls, bootstrap, bootstrap_json, command, tls_json
from treeline_operator.envoy.keys import (
    FILTER,
    KeyFile,
    credentials,
    discovery_json,
    filter_config,
    read_secret,
)
from treeline_wire import headers as names


def manager(config: EnvoyConfig) -> dict[str, Any]:
    """The HTTP connection manager of the gateway's listener."""
    listener = bootstrap(config)["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]  # type: ignore[no-any-return]


def cluster(config: EnvoyConfig, name: str) -> dict[str, Any]:
    (found,) = [c for c in bootstrap(config)["static_resources"]["clusters"] if c["name"] == name]
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return self_signed(tmp_path_factory.mktemp("tls"))


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
    ],
    ids=["default", "ipv6", "dns", "everything", "duplex", "streamed", "none"],
)
def test_the_real_envoy_accepts_it(config: EnvoyConfig, tmp_path: Path) -> None:
    assert validate(config, tmp_path) == ""


def test_the_real_envoy_accepts_tls(certificate: Tls, tmp_path: Path) -> None:
    assert validate(EnvoyConfig(tls=certificate), tmp_path) == ""


def test_the_real_envoy_accepts_what_runs_in_a_cluster(certificate: Tls, tmp_path: Path) -> None:
    keys, tls = tmp_path / "keys.json", replace(certificate, discovery_file=str(tmp_path / "tls.json"))
    keys.write_text(discovery_json(credentials({"ada": ["sk-1"]}), "1"))
    Path(tls.discovery_file or "").write_text(tls_json(tls))
    config = EnvoyConfig(
        listen_host="0.0.0.0", admin_port=9901, health_port=8081, api_keys_file=str(keys), tls=tls
    )
    assert validate(config, tmp_path) == ""
    assert "sk-1" not in bootstrap_json(config)


def test_keys_from_a_file_mean_the_same_as_keys_in_the_bootstrap() -> None:
    inline = manager(EnvoyConfig(api_keys={"ada": "sk-1"}))["http_filters"][1]
    assert inline["name"] == FILTER
    assert inline["typed_config"] == filter_config((("sk-1", "ada"),))
    watched = manager(EnvoyConfig(api_keys_file="/run/keys.json"))["http_filters"][1]
    assert watched["name"] == FILTER
    assert watched["config_discovery"]["type_urls"] == [inline["typed_config"]["@type"]]


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


def test_a_mounted_secret_is_read_as_it_is_and_told_without_its_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret, file = tmp_path / "secret", tmp_path / "keys.json"
    (secret / "..data").mkdir(parents=True)
    for name, content in {"zoe": "sk-2\n\n sk-1 \n", "bob": "sk-1", "eve": " \n", ".hidden": "sk-3"}.items():
        (secret / name).write_text(content)
    assert read_secret(secret) == {"bob": ("sk-1",), "eve": (), "zoe": ("sk-2", "sk-1")}
    keys = KeyFile(secret, file)
    assert keys.refresh()
    (resource,) = json.loads(file.read_text())["resources"]
    assert resource["typed_config"]["credentials"] == [
        {"key": "sk-1", "client": "bob"},
        {"key": "sk-2", "client": "zoe"},
    ]
    assert "eve is empty" in caplog.text
    assert "zoe has the same API key as client bob" in caplog.text
    assert "sk-" not in caplog.text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    caplog.clear()
    assert not keys.refresh()
    assert caplog.text == ""
    (secret / "bob").write_text("sk-4")
    assert keys.refresh()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "secret"]


def test_the_real_envoy_would_refuse_a_mistake(tmp_path: Path) -> None:
    assert "/nowhere.key" in validate(EnvoyConfig(tls=Tls("/nowhere.pem", "/nowhere.key")), tmp_path)


def test_the_bootstrap_is_plain_json_and_the_same_every_time() -> None:
    config = EnvoyConfig(api_keys={"ada": "sk-1"})
    assert (
        json.loads(bootstrap_json(config))
        == bootstrap(config)
        == bootstrap(EnvoyConfig(api_keys={"ada": "sk-1"}))
    )


def test_the_first_filter_strips_and_the_picker_is_asked_before_the_router() -> None:
    filters = manager(EnvoyConfig(api_keys={"ada": "sk-1"}))["http_filters"]
    assert [f["name"].removeprefix("envoy.filters.http.") for f in filters] == [
        "header_mutation",
        "api_key_auth",
        "ext_proc",
        "router",
    ]
    removed = filters[0]["typed_config"]["mutations"]["request_mutations"]
    prefixes = [m["remove_on_match"]["key_matcher"]["prefix"] for m in removed if "remove_on_match" in m]
    assert all(
        any(name.startswith(p) for p in prefixes) for name in (names.DESTINATION, names.SUBSET, names.SERVED)
    )


def test_a_request_may_be_held_for_an_hour_and_answered_for_as_long_as_it_takes() -> None:
    http = manager(EnvoyConfig())
    route = http["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    (ext_proc,) = [f["typed_config"] for f in http["http_filters"] if f["name"].endswith("ext_proc")]
    assert route["timeout"] == "0s"
    assert http["request_timeout"] == "0s"
    assert http["stream_idle_timeout"] == route["idle_timeout"] == ext_proc["max_message_timeout"] == "3600s"
    assert ext_proc["message_timeout"] == "1s"
    assert ext_proc["failure_mode_allow"] is True


def test_long_generations_do_not_trip_circuit_breakers() -> None:
    for name in ("pods", "ext_proc"):
        (limits,) = cluster(EnvoyConfig(), name)["circuit_breakers"]["thresholds"]
        assert min(limits[k] for k in ("max_connections", "max_pending_requests", "max_requests")) >= 40_000


def test_workers_hear_of_a_changed_health_at_once() -> None:
    for name in ("pods", "ext_proc"):
        assert cluster(EnvoyConfig(), name)["common_lb_config"]["update_merge_window"] == "0s"


def test_the_admin_page_is_on_loopback_even_if_the_listener_is_not() -> None:
    config = bootstrap(EnvoyConfig(listen_host="0.0.0.0"))
    assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"


def test_the_access_log_has_no_query_no_body_and_no_other_header() -> None:
    line = manager(EnvoyConfig())["access_log"][0]["typed_config"]["log_format"]["json_format"]
    read = [value for value in line.values() if "REQ(" in value or "RESP(" in value]
    assert sorted(read) == sorted(
        ["%REQ(:METHOD)%", "%REQ(X-REQUEST-ID)%", f"%REQ({names.DESTINATION.upper()})%"]
    )
    assert line["path"] == "%PATH(NQ)%"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_body_mode": "FULL_DUPLEX_STREAMED"}, "fail_open"),
        ({"body_limit": 10}, "bytes"),
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
