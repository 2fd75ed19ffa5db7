"""The allow-lists of inference paths: their contents, and the comparison of paths."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from treeline_wire.paths import BELOW, INFERENCE, inference_paths, is_inference

NEVER = re.compile(
    "flush|abort|metric|server_info|model_info|load|weight|sleep|wake|pause|resume|profile|lora|reset|rpc|memory"
    "|session|internal|logging|debug|docs|openapi|invocations|ready|live|generate_from_file|health_generate|kv|tokenizer"
)


def test_no_administration_of_any_engine_is_in_a_list() -> None:
    paths = {rule.path for rules in INFERENCE.values() for rule in rules}
    assert not [path for path in paths if NEVER.search(path)]
    assert all(path.startswith("/") and path == path.lower() and "//" not in path for path in paths)


def test_only_post_changes_anything() -> None:
    for rules in INFERENCE.values():
        for rule in rules:
            assert set(rule.methods) <= {"GET", "HEAD", "OPTIONS"} or set(rule.methods) == {"POST", "OPTIONS"}


@pytest.mark.parametrize("engine", INFERENCE)
def test_listed_paths_are_allowed_with_their_methods_only(engine: str) -> None:
    for rule in INFERENCE[engine]:
        path = f"{rule.path}/Qwen/Qwen3-0.6B:v1" if rule.below else rule.path
        for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "get", ""):
            assert is_inference(engine, method, path) == (method in rule.methods)


ABNORMAL = (
    "",
    "/",
    "//v1/models",
    "/v1/Models",
    "/v1/completions/",
    "/v1/models\n",
    *(f"/v1/models/{name}" for name in ("", "/x", "../x", "x/..", "%2e%2e/x", "x%2fy", "x;y", "x\\y", "x?y")),
    *(f"/v1/models/{name}" for name in ("x#y", "x%00", "x%", "x%25", "x\n", "x y")),
)


@pytest.mark.parametrize("path", ABNORMAL)
def test_abnormally_written_paths_are_refused(path: str) -> None:
    for engine in INFERENCE:
        assert not any(is_inference(engine, method, path) for method in ("GET", "POST"))


@given(st.text(alphabet="/.%2efFcC5;\\?#ab_-:", max_size=30))
@example("/../flush_cache")
@example("/..%2fflush_cache")
def test_a_path_below_another_never_leaves_it(tail: str) -> None:
    path = f"/v1/models{tail}"
    if any(is_inference(engine, "GET", path) for engine in INFERENCE):
        assert ".." not in path.split("/")
        assert "%2" not in path.lower() or re.fullmatch(r"(?:[^%]|%(?:20|2b|2c|3a|3d|40))*", path.lower())


def test_the_union_has_each_path_once_and_does_not_depend_on_the_order() -> None:
    both = inference_paths(["vllm", "treeline", "vllm"])
    assert both == inference_paths(["treeline", "vllm"])
    assert len(both) == len(set(both))
    assert set(both) == {*INFERENCE["treeline"], *INFERENCE["vllm"]}


def test_an_engine_without_a_list_is_an_error() -> None:
    with pytest.raises(KeyError):
        inference_paths(["unheard-of"])
    with pytest.raises(KeyError):
        is_inference("", "GET", "/v1/models")


def test_the_pattern_has_no_look_around_which_the_edge_cannot_read() -> None:
    assert "(?!" not in BELOW
    assert "(?=" not in BELOW
    assert re.compile(BELOW)
