"""Names and numbers that others rely on, model resolution, and the shape of errors."""

import pytest
from treeline_wire import headers, labels, ports
from treeline_wire.models import ModelNotFound, ModelTable, ModelTarget
from treeline_wire.openai_errors import error_body


def test_ports() -> None:
    assert (ports.RUNTIME_HTTP, ports.EVENTS, ports.REPLAY, ports.LOAD) == (8000, 5557, 5657, 5757)
    assert (ports.EXT_PROC, ports.EDS, ports.METRICS, ports.GATEWAY) == (9002, 9003, 9090, 8080)


def test_headers_are_lower_case_and_distinct() -> None:
    names = {name: value for name, value in vars(headers).items() if name.isupper()}
    assert all(value == value.lower() for value in names.values())
    assert len(set(names.values())) == len(names)
    assert headers.DESTINATION == "x-gateway-destination-endpoint"
    assert headers.OBJECTIVE == "x-gateway-inference-objective"
    assert headers.OBJECTIVE_LLMD == "x-llm-d-inference-objective"
    assert {name for name in names.values() if name.startswith("x-treeline-")} == {
        "x-treeline-cached-tokens",
        "x-treeline-prompt-tokens",
        "x-treeline-endpoint",
        "x-treeline-overloaded",
        "x-treeline-edge",
        "x-treeline-elsewhere",
    }


def test_labels() -> None:
    names = (labels.POOL, labels.ROLE, labels.SERVING)
    assert names == ("treeline.dev/pool", "treeline.dev/role", "treeline.dev/serving")


def test_the_model_picks_the_pool() -> None:
    pools = {"small": ["a", "b"], "large": ["c", "b"]}
    table = ModelTable(pools)
    assert table.resolve("c") == ModelTarget("large", "c")
    assert table.resolve("b") == ModelTarget("small", "b"), "the first pool that serves it"
    assert table.names() == ["a", "b", "c"]


@pytest.mark.parametrize("pools", [{}, {"p": []}, {"p": ["a", "b"]}, {"p": ["a"], "q": ["a"]}])
def test_an_unknown_model_is_not_found(pools: dict[str, list[str]]) -> None:
    for name in ("x", None):
        with pytest.raises(ModelNotFound) as caught:
            ModelTable(pools).resolve(name)
        assert caught.value.name == name


def test_no_model_is_needed_where_there_is_only_one() -> None:
    assert ModelTable({"p": ["a"], "q": []}).resolve(None) == ModelTarget("p", "a")


def test_errors_have_openais_shape() -> None:
    assert error_body("no", "not_found_error", code="model_not_found") == {
        "error": {"message": "no", "type": "not_found_error", "param": None, "code": "model_not_found"}
    }
