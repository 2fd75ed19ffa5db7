"""Names and numbers that other projects rely on, and the format of errors."""

from treeline_wire import headers, labels, ports
from treeline_wire.openai_errors import error_body


def test_ports() -> None:
    assert (ports.RUNTIME_HTTP, ports.EVENTS, ports.REPLAY, ports.LOAD) == (8000, 5557, 5657, 5757)
    assert (ports.EXT_PROC, ports.EDS, ports.METRICS, ports.GATEWAY) == (9002, 9003, 9090, 8080)
    assert (ports.RUNTIME_METRICS, ports.RUNTIME_ADMIN, ports.PICKER_ADMIN) == (9600, 9700, 9004)


def test_headers_are_lower_case_and_distinct() -> None:
    values = {"CREDENTIALS", "ENGINES", "PER_KEY", "SHARED"}
    names = {name: value for name, value in vars(headers).items() if name.isupper() and name not in values}
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
        "x-treeline-fork",
        "x-treeline-client",
        "x-treeline-isolation",
        "x-treeline-ignored",
        "x-treeline-pages-from",
    }


def test_labels() -> None:
    names = (labels.POOL, labels.ROLE, labels.SERVING)
    assert names == ("treeline.dev/pool", "treeline.dev/role", "treeline.dev/serving")


def test_errors_have_openais_shape() -> None:
    assert error_body("no", "not_found_error", code="model_not_found") == {
        "error": {"message": "no", "type": "not_found_error", "param": None, "code": "model_not_found"}
    }
