"""KServe's inference protocol over gRPC (fake scheduler): texts in tensors, streams, the key, limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ports import free_base
from support.runtime_server import ServerProcess, eventually, running
from treeline_runtime.grpc import inference_pb2 as pb

SERVICE = "inference.GRPCInferenceService"
KEY = (("authorization", "Bearer correct-horse"),)
METHODS: dict[str, tuple[Any, Any]] = {
    "ServerLive": (pb.ServerLiveRequest, pb.ServerLiveResponse),
    "ServerReady": (pb.ServerReadyRequest, pb.ServerReadyResponse),
    "ModelReady": (pb.ModelReadyRequest, pb.ModelReadyResponse),
    "ServerMetadata": (pb.ServerMetadataRequest, pb.ServerMetadataResponse),
    "ModelMetadata": (pb.ModelMetadataRequest, pb.ModelMetadataResponse),
    "ModelInfer": (pb.ModelInferRequest, pb.ModelInferResponse),
}


class Client:
    """Calls with the key, unless told otherwise."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_send_message_length", -1)])

    def __call__(self, method: str, message: Any = None, *, metadata: Any = KEY, timeout: float = 60.0) -> Any:
        asked, answer = METHODS[method]
        call = self.channel.unary_unary(f"/{SERVICE}/{method}", asked.SerializeToString, answer.FromString)
        return call(asked() if message is None else message, metadata=metadata, timeout=timeout)

    def stream(self, *messages: Any, metadata: Any = KEY, timeout: float = 60.0) -> Any:
        call = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        return call(iter(messages), metadata=metadata, timeout=timeout)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture(scope="module")
def port() -> int:
    return free_base(1)


@pytest.fixture(scope="module")
def server(model: Path, port: int) -> Iterator[ServerProcess]:
    with running(model, "--api-key=correct-horse", "--no-events", f"--grpc-port={port}", fake=True) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": "Bearer correct-horse"}) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: ServerProcess, port: int) -> Iterator[Client]:
    made = Client(port)
    yield made
    made.close()


def tensor(name: str, *elements: Any, datatype: str = "BYTES", member: str = "bytes_contents") -> Any:
    made = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[len(elements)])
    getattr(made.contents, member).extend(elements)
    return made


def asked(*texts: str, stream: bool = False, more: Any = (), **sampling: Any) -> Any:
    inputs = [tensor("text_input", *(text.encode() for text in texts)), *more]
    if sampling:
        inputs.append(tensor("sampling_parameters", json.dumps(sampling).encode()))
    if stream:
        inputs.append(tensor("stream", True, datatype="BOOL", member="bool_contents"))
    return pb.ModelInferRequest(model_name="random", id="", inputs=inputs)


def texts_of(response: Any) -> list[str]:
    (output,) = [one for one in response.outputs if one.name == "text_output"]
    assert list(output.shape) == [len(output.contents.bytes_contents)]
    return [text.decode() for text in output.contents.bytes_contents]


def generated(http: httpx.Client, text: Any, **sampling: Any) -> Any:
    made = http.post("/generate", json={"text": text, "sampling_params": sampling})
    assert made.status_code == 200, made.text
    return made.json()


def refused(status: grpc.StatusCode, call: Any) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() == status, raised.value
    return str(raised.value.details())


# ---- answers --------------------------------------------------------------------------------------------------------


def test_a_text_equals_the_answer_of_generate(client: Client, http: httpx.Client) -> None:
    theirs = generated(http, "hello world", max_new_tokens=4)
    made = client("ModelInfer", asked("hello world", max_tokens=4))
    assert texts_of(made) == [theirs["text"]]
    assert made.model_name == "random"
    meta = theirs["meta_info"]
    assert made.parameters["prompt_tokens"].int64_param == meta["prompt_tokens"]
    assert made.parameters["completion_tokens"].int64_param == meta["completion_tokens"]
    (finish,) = [one for one in made.outputs if one.name == "finish_reason"]
    assert list(finish.contents.bytes_contents) == [b"length"]


def test_parameters_come_in_three_forms(client: Client, http: httpx.Client) -> None:
    expected = [generated(http, "hello world", max_new_tokens=3)["text"]]
    limit = tensor("max_tokens", 3, datatype="INT32", member="int_contents")
    by_tensor = asked("hello world", more=[limit])
    by_parameter = asked("hello world")
    by_parameter.parameters["max_tokens"].int64_param = 3
    by_parameter.parameters["temperature"].string_param = "0.5"
    by_parameter.parameters["top_p"].double_param = 0.9
    for form in (by_tensor, by_parameter, asked("hello world", max_tokens=3, temperature=0)):
        assert texts_of(client("ModelInfer", form)) == expected


def test_several_texts_and_choices_are_answered_in_order(client: Client, http: httpx.Client) -> None:
    theirs = [generated(http, text, max_new_tokens=3)["text"] for text in ("hello", "world")]
    assert texts_of(client("ModelInfer", asked("hello", "world", max_tokens=3))) == theirs
    both = texts_of(client("ModelInfer", asked("hello", "world", max_tokens=3, n=2)))
    assert both == [theirs[0], theirs[0], theirs[1], theirs[1]]


def test_a_large_text_is_read_in_another_process(client: Client, http: httpx.Client) -> None:
    text = "hello world " * 900
    theirs = generated(http, text, max_new_tokens=2)
    made = client("ModelInfer", asked(text, max_tokens=2))
    assert texts_of(made) == [theirs["text"]]
    assert made.parameters["prompt_tokens"].int64_param == theirs["meta_info"]["prompt_tokens"]


def test_the_prompt_may_come_first(client: Client, http: httpx.Client) -> None:
    echo = tensor("exclude_input_in_output", False, datatype="BOOL", member="bool_contents")
    text = generated(http, "hello", max_new_tokens=3)["text"]
    assert texts_of(client("ModelInfer", asked("hello", more=[echo], max_tokens=3))) == ["hello" + text]
    parts = list(client.stream(asked("hello", stream=True, more=[echo], max_tokens=3)))
    assert "".join(texts_of(part.infer_response)[0] for part in parts) == "hello" + text


def test_raw_contents_are_answered_with_raw_contents(client: Client, http: httpx.Client) -> None:
    framed = len(b"hello").to_bytes(4, "little") + b"hello"
    request = pb.ModelInferRequest(
        model_name="random",
        id="one",
        inputs=[
            pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1]),
            pb.ModelInferRequest.InferInputTensor(name="max_tokens", datatype="INT32", shape=[1, 1]),
        ],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")],
        raw_input_contents=[framed, (3).to_bytes(4, "little")],
    )
    made = client("ModelInfer", request)
    text = generated(http, "hello", max_new_tokens=3)["text"].encode()
    assert list(made.raw_output_contents) == [len(text).to_bytes(4, "little") + text]
    assert ([one.name for one in made.outputs], made.id) == (["text_output"], "one")
    request.raw_input_contents[0] = framed[:-1]
    assert "text_input" in refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: client("ModelInfer", request))


def test_a_stream_adds_up_and_says_which_response_is_the_last(client: Client, http: httpx.Client) -> None:
    text = generated(http, "hello world", max_new_tokens=6)["text"]
    parts = [part.infer_response for part in client.stream(asked("hello world", stream=True, max_tokens=6))]
    assert len(parts) > 1
    assert "".join(texts_of(part)[0] for part in parts) == text
    last = [part.parameters["triton_final_response"].bool_param for part in parts]
    assert last == [False] * (len(parts) - 1) + [True]
    several = [part.infer_response for part in client.stream(asked("hello", "world", stream=True, max_tokens=3))]
    joined = {0: "", 1: ""}
    for part in several:
        joined[part.parameters["index"].int64_param] += texts_of(part)[0]
    assert joined == {i: generated(http, one, max_new_tokens=3)["text"] for i, one in enumerate(("hello", "world"))}


def test_an_error_ends_its_request_and_not_the_stream(client: Client) -> None:
    wrong = asked("hello", max_tokens=-1)
    wrong.id = "wrong"
    first, second = client.stream(wrong, asked("hello", max_tokens=1))
    assert "max_new_tokens" in first.error_message
    assert first.infer_response.id == "wrong"
    assert texts_of(second.infer_response)


def test_the_bytes_of_tritons_client_are_read_and_answered() -> None:
    """As tritonclient 2.73 writes and reads them."""
    sent = (
        b'\n\x01m\x12\x011\x1a\x017"\x10\n\nmax_tokens\x12\x02\x10\x03*\x1c\n\ntext_input\x12\x05BYTES\x1a\x01\x01*\x04B\x02hi*\x16\n'
        b"\x06stream\x12\x04BOOL\x1a\x01\x01*\x03\n\x01\x012\r\n\x0btext_output:\x06\x02\x00\x00\x00hi"
    )
    request = pb.ModelInferRequest.FromString(sent)
    assert (request.model_name, request.model_version, request.id) == ("m", "1", "7")
    assert request.parameters["max_tokens"].int64_param == 3
    text, stream = request.inputs
    assert (text.name, text.datatype, [*text.shape], [*text.contents.bytes_contents]) == (
        "text_input",
        "BYTES",
        [1],
        [b"hi"],
    )
    assert (stream.name, stream.datatype, [*stream.contents.bool_contents]) == ("stream", "BOOL", [True])
    assert ([one.name for one in request.outputs], [*request.raw_input_contents]) == (["text_output"], [b"\2\0\0\0hi"])
    answer = pb.ModelInferResponse(model_name="m", model_version="1", id="7", raw_output_contents=[b"\2\0\0\0hi"])
    answer.parameters["n"].int64_param = 3
    answer.outputs.add(name="text_output", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    made = pb.ModelStreamInferResponse(error_message="e", infer_response=answer)
    assert made.SerializeToString(deterministic=True) == (
        b'\n\x01e\x129\n\x01m\x12\x011\x1a\x017"\x07\n\x01n\x12\x02\x10\x03*\x1d\n\x0btext_output\x12\x05BYTES\x1a\x01\x01*\x04B\x02hi2'
        b"\x06\x02\x00\x00\x00hi"
    )


def test_parameters_about_the_protocol_are_left_out(client: Client) -> None:
    request = asked("hello", max_tokens=1)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    assert texts_of(client("ModelInfer", request))


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (pb.ModelInferRequest(model_name="random"), "text_input"),
        (asked("hello", stream=True), "ModelStreamInfer"),
        (asked("hello", top_p=2), "top_p"),
        (asked("hello", unheard_of=1), "unheard_of"),
        (asked("hello", more=[tensor("text", b"x")]), "text"),
        (asked("hello", more=[tensor("seed", b"x", datatype="FP16")]), "datatype"),
        (asked(), "text_input"),
        (asked("word " * 9000), "context length"),
        (asked(*["x"] * 1025), "more than 1024"),
        (asked("hello", more=[tensor(f"t{i}", b"x") for i in range(64)]), "more than 64"),
        (asked("hello", more=[tensor("sampling_parameters", b"[" * 9)]), "JSON"),
        (asked("hello", more=[tensor("sampling_parameters", b" " * 70_000 + b"{}")]), "JSON"),
        (asked("hello", more=[tensor("max_tokens", b"\xff")]), "UTF-8"),
        (asked("hello", more=[tensor("top_p", b"much")]), "top_p"),
    ],
)
def test_a_wrong_request_is_an_invalid_argument(client: Client, message: Any, named: str) -> None:
    assert named in refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: client("ModelInfer", message))


def test_elements_must_have_the_shape(client: Client) -> None:
    message = asked("hello")
    message.inputs[0].shape[0] = 2
    assert "shape" in refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: client("ModelInfer", message))


def test_another_model_is_not_found(client: Client) -> None:
    message = asked("hello")
    message.model_name = "other"
    assert "other" in refused(grpc.StatusCode.NOT_FOUND, lambda: client("ModelInfer", message))
    for method in ("ModelReady", "ModelMetadata"):
        unknown = METHODS[method][0](name="other")
        refused(grpc.StatusCode.NOT_FOUND, lambda method=method, unknown=unknown: client(method, unknown))


def test_nobody_gets_in_without_the_key(client: Client) -> None:
    for metadata in ((), (("authorization", "Bearer wrong"),), (*KEY, *KEY), (("authorization", "correct-horse"),)):
        for method in ("ModelInfer", "ModelMetadata", "ModelReady", "ServerMetadata"):
            refused(grpc.StatusCode.UNAUTHENTICATED, lambda m=method, d=metadata: client(m, metadata=d))
        refused(grpc.StatusCode.UNAUTHENTICATED, lambda d=metadata: list(client.stream(asked("hello"), metadata=d)))
    assert client("ServerLive", metadata=()).live, "a probe"
    assert client("ServerReady", metadata=()).ready
    assert texts_of(client("ModelInfer", asked("hello", max_tokens=1), metadata=(("x-api-key", "correct-horse"),)))


def test_a_message_over_the_limit_is_refused(client: Client) -> None:
    large = asked("x" * (4 << 20))
    refused(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: client("ModelInfer", large))


@given(st.binary(max_size=200))
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_get_a_status_and_the_server_goes_on(client: Client, data: bytes) -> None:
    call = client.channel.unary_unary(f"/{SERVICE}/ModelInfer", lambda text: text, lambda text: text)
    with pytest.raises(grpc.RpcError) as raised:
        call(data, metadata=KEY, timeout=60)
    assert raised.value.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    )
    assert client("ServerLive").live


def test_facts_of_server_and_model(client: Client) -> None:
    assert client("ServerMetadata").name == "treeline"
    assert client("ModelReady", pb.ModelReadyRequest(name="random")).ready
    facts = client("ModelMetadata", pb.ModelMetadataRequest(name="random"))
    assert (facts.inputs[0].name, facts.inputs[0].datatype) == ("text_input", "BYTES")
    assert [one.name for one in facts.outputs] == ["text_output", "finish_reason"]


# ---- calls that end -------------------------------------------------------------------------------------------------


def in_flight(http: httpx.Client) -> int:
    return int(http.get("/load").json()["server_load"])


def test_a_deadline_ends_the_request(client: Client, http: httpx.Client) -> None:
    message = asked("hello", max_tokens=900)
    refused(grpc.StatusCode.DEADLINE_EXCEEDED, lambda: client("ModelInfer", message, timeout=0.5))
    eventually(lambda: in_flight(http) == 0, what="nothing runs any more")


def test_a_cancelled_stream_ends_the_request(client: Client, http: httpx.Client) -> None:
    call = client.stream(asked("hello", stream=True, max_tokens=900))
    assert next(iter(call)).infer_response.outputs
    call.cancel()
    eventually(lambda: in_flight(http) == 0, what="nothing runs any more")


def test_clients_without_a_key_cannot_hold_calls(client: Client, port: int) -> None:
    """A call that never sends its message is answered and over."""
    silent, gate = Client(port), threading.Event()

    def nothing() -> Iterator[Any]:
        gate.wait()
        yield from ()

    try:
        for method in ("ServerLive", "ServerReady"):
            call = silent.channel.stream_unary(f"/{SERVICE}/{method}", bytes, METHODS[method][1].FromString)
            for waiting in [call.future(nothing()) for _ in range(20)]:
                waiting.result(timeout=60)
        assert client("ServerLive").live
    finally:
        gate.set()
        silent.close()
