"""SGLang's scheduler service over gRPC, as the published stubs of its router see it (fake scheduler)."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import Descriptor
from smg_grpc_proto import sglang_scheduler_pb2 as theirs
from smg_grpc_proto import sglang_scheduler_pb2_grpc as stubs
from support.ports import free_base
from support.runtime_server import ServerProcess, eventually, running
from treeline_runtime.grpc import scheduler_pb2 as ours

TINY = Path(__file__).parents[3] / "models" / "tiny"
SAMPLED = {"temperature": 0.0, "max_new_tokens": 4}
KEY = (("authorization", "Bearer correct-horse"),)


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
def stub(server: ServerProcess, port: int) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield stubs.SglangSchedulerStub(channel)


def ids_of(http: httpx.Client, text: str) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def asked(ids: list[int], *, stream: bool = False, sampling: Any = None, **more: Any) -> Any:
    """A request as SGLang's router makes it: all sampling parameters are set."""
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1, "max_new_tokens": 4}
    params = theirs.SamplingParams(skip_special_tokens=True, **{**usual, **(sampling or {})})
    tokenized = theirs.TokenizedInput(original_text="x", input_ids=ids)
    return theirs.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=stream, **more)


def generate(stub: Any, request: Any, **more: Any) -> list[Any]:
    return list(stub.Generate(request, metadata=KEY, timeout=60, **more))


def refused(status: grpc.StatusCode, call: Any) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() == status, raised.value
    return str(raised.value.details())


def test_our_messages_have_the_published_names_numbers_and_types() -> None:
    def shape(descriptor: Descriptor) -> dict[str, tuple[Any, ...]]:
        return {
            field.name: (
                field.number,
                field.type,
                field.is_repeated,
                field.has_presence,
                field.message_type and field.message_type.name,
                field.containing_oneof and field.containing_oneof.name,
            )
            for field in descriptor.fields
        }

    for name, descriptor in ours.DESCRIPTOR.message_types_by_name.items():
        published = shape(theirs.DESCRIPTOR.message_types_by_name[name])
        found = shape(descriptor)
        assert found == {field: published[field] for field in found}, name


def test_ids_equal_the_answer_of_generate(stub: Any, http: httpx.Client) -> None:
    ids = ids_of(http, "hello world")
    made = http.post("/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 4}}).json()
    (answer,) = generate(stub, asked(ids, request_id="mine"))
    assert (answer.request_id, list(answer.complete.output_ids)) == ("mine", made["output_ids"])
    meta = made["meta_info"]
    complete = answer.complete
    assert (complete.finish_reason, complete.prompt_tokens) == ("length", len(ids))
    assert (complete.completion_tokens, complete.cached_tokens) == (4, meta["cached_tokens"])


def test_a_stream_has_new_ids_and_then_the_end(stub: Any, http: httpx.Client) -> None:
    ids = ids_of(http, "hello world")
    (whole,) = generate(stub, asked(ids))
    *chunks, last = generate(stub, asked(ids, stream=True))
    assert len(chunks) > 1
    assert [id for one in chunks for id in one.chunk.token_ids] == list(whole.complete.output_ids)
    assert [one.chunk.completion_tokens for one in chunks][-1] == 4
    assert list(last.complete.output_ids) == list(whole.complete.output_ids)
    assert last.complete.finish_reason == "length"


def test_choices_have_an_index(stub: Any, http: httpx.Client) -> None:
    ids = ids_of(http, "hello world")
    for stream in (False, True):
        answers = generate(stub, asked(ids, stream=stream, sampling={"n": 2}))
        ends = {one.complete.index: list(one.complete.output_ids) for one in answers if one.HasField("complete")}
        assert ends[0] == ends[1]
        assert len(ends[0]) == 4


def test_a_stop_string_is_reported(stub: Any, http: httpx.Client) -> None:
    ids = ids_of(http, "hello world")
    (made,) = generate(stub, asked(ids, sampling={"max_new_tokens": 90, "stop": ["world"]}))
    assert (made.complete.finish_reason, made.complete.matched_stop_str) == ("stop", "world")


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Any, httpx.Client]]:
    """The same of a server with a model."""
    port = free_base(1)
    with (
        running(TINY, "--no-events", f"--grpc-port={port}") as server,
        server.client() as http,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield stubs.SglangSchedulerStub(channel), http


@pytest.mark.deep
@pytest.mark.integration
def test_log_probabilities_of_prompt_and_output(tiny: tuple[Any, httpx.Client]) -> None:
    stub, http = tiny
    ids = ids_of(http, "hello world")
    wanted: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    made = http.post("/generate", json={"input_ids": ids, "sampling_params": SAMPLED, **wanted}).json()
    meta = made["meta_info"]
    (whole,) = generate(stub, asked(ids, sampling=SAMPLED, **wanted))
    output, input = whole.complete.output_logprobs, whole.complete.input_logprobs
    assert list(output.token_ids) == [id for _, id, _ in meta["output_token_logprobs"]]
    assert list(output.token_logprobs) == pytest.approx([value for value, _, _ in meta["output_token_logprobs"]])
    assert [len(top.token_ids) for top in output.top_logprobs] == [2] * 4
    assert list(input.token_ids) == ids
    assert not input.token_logprobs[0].HasField("value"), "the first token has none"
    assert [one.value for one in input.token_logprobs][1:] == pytest.approx(
        [value for value, _, _ in meta["input_token_logprobs"]][1:]
    )
    *chunks, last = generate(stub, asked(ids, stream=True, sampling=SAMPLED, **wanted))
    assert [id for one in chunks for id in one.chunk.output_logprobs.token_ids] == list(output.token_ids)
    assert [id for one in chunks for id in one.chunk.input_logprobs.token_ids] == ids
    assert not last.complete.HasField("output_logprobs")


@pytest.mark.deep
@pytest.mark.integration
def test_a_stop_token_is_reported_and_a_grammar_holds(tiny: tuple[Any, httpx.Client]) -> None:
    stub, http = tiny
    ids = ids_of(http, "hello world")
    (made,) = generate(stub, asked(ids, sampling=SAMPLED))
    last = made.complete.output_ids[-1]
    (stopped,) = generate(stub, asked(ids, sampling=SAMPLED | {"stop_token_ids": [last]}))
    assert (stopped.complete.finish_reason, stopped.complete.matched_token_id) == ("stop", last)
    bounded = {"temperature": 0.0, "max_new_tokens": 50, "regex": "(Paris|Rome){3}"}
    for stream in (False, True):
        answers = generate(stub, asked(ids, stream=stream, sampling=bounded))
        shown = [id for one in answers for id in one.chunk.token_ids] or answers[-1].complete.output_ids
        text = http.post("/detokenize", json={"tokens": list(shown)}).json()["text"]
        assert re.fullmatch("(Paris|Rome){3}", text)
        assert list(answers[-1].complete.output_ids) == list(shown)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"sampling": {"max_new_tokens": 1 << 20}}, "context length"),
        ({"sampling": {"min_p": 7.0}}, "min_p"),
        ({"sampling": {"n": 5000}}, "n"),
        ({"sampling": {"stop": ["x"] * 2000}}, "stop"),
        ({"sampling": {"stop_token_ids": [1 << 31]}}, "stop_token_ids"),
        ({"mm_inputs": theirs.MultimodalInputs(image_urls=["x"])}, "mm_inputs"),
        ({"disaggregated_params": theirs.DisaggregatedParams(bootstrap_host="x")}, "disaggregated_params"),
        ({"input_embeds": [0.5]}, "input_embeds"),
        ({"token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"data_parallel_rank": 3}, "data_parallel_rank"),
        ({"custom_logit_processor": "{}"}, "custom_logit_processor"),
    ],
)
def test_a_wrong_field_is_named(stub: Any, more: dict[str, Any], named: str) -> None:
    request = asked([5, 6], **more)
    assert named in refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: generate(stub, request))


def test_wrong_ids_and_adapters_are_refused(stub: Any) -> None:
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: generate(stub, asked([])))
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: generate(stub, asked([1 << 31])))
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: generate(stub, asked([5], lora_id="none")))


def test_nobody_gets_in_without_the_key(stub: Any) -> None:
    for method, message in (
        (stub.HealthCheck, theirs.HealthCheckRequest()),
        (stub.Abort, theirs.AbortRequest(request_id="x")),
        (stub.GetModelInfo, theirs.GetModelInfoRequest()),
        (stub.GetServerInfo, theirs.GetServerInfoRequest()),
        (stub.Embed, theirs.EmbedRequest()),
    ):
        refused(grpc.StatusCode.UNAUTHENTICATED, lambda m=method, d=message: m(d, timeout=60))
    refused(grpc.StatusCode.UNAUTHENTICATED, lambda: list(stub.Generate(asked([5]), timeout=60)))


def test_facts_health_and_what_is_not_served(stub: Any, http: httpx.Client) -> None:
    model = stub.GetModelInfo(theirs.GetModelInfoRequest(), metadata=KEY)
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert (model.served_model_name, model.max_context_length, model.is_generation) == ("random", context, True)
    facts = stub.GetServerInfo(theirs.GetServerInfoRequest(), metadata=KEY)
    assert facts.server_args["api_key"] in ("", None) or "correct-horse" not in str(facts.server_args)
    assert "correct-horse" not in str(facts)
    assert facts.server_type == "grpc"
    assert stub.HealthCheck(theirs.HealthCheckRequest(), metadata=KEY, timeout=60).healthy
    said = refused(grpc.StatusCode.UNIMPLEMENTED, lambda: stub.Embed(theirs.EmbedRequest(), metadata=KEY))
    assert "/v1/embeddings" in said
    refused(grpc.StatusCode.UNIMPLEMENTED, lambda: stub.GetLoads(theirs.GetLoadsRequest(), metadata=KEY))


def test_a_request_is_aborted_by_its_id(stub: Any, http: httpx.Client) -> None:
    found: list[Any] = []
    request = asked(ids_of(http, "hello"), request_id="long", sampling={"max_new_tokens": 900}, stream=True)
    call = stub.Generate(request, metadata=KEY, timeout=60)
    found.append(next(call))
    reading = threading.Thread(target=lambda: found.extend(call))
    reading.start()
    assert stub.Abort(theirs.AbortRequest(request_id="long"), metadata=KEY).success
    reading.join(60)
    assert found[-1].complete.finish_reason == "abort"
    assert not stub.Abort(theirs.AbortRequest(request_id="long"), metadata=KEY).success
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: stub.Abort(theirs.AbortRequest(), metadata=KEY))


def test_an_id_is_in_use_once(stub: Any, http: httpx.Client) -> None:
    request = asked(ids_of(http, "hello"), request_id="twice", sampling={"max_new_tokens": 900}, stream=True)
    call = stub.Generate(request, metadata=KEY, timeout=60)
    next(call)
    assert "twice" in refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: generate(stub, request))
    call.cancel()
    eventually(lambda: http.get("/load").json()["server_load"] == 0, what="nothing runs any more")


def test_a_full_server_is_unavailable(model: Path) -> None:
    port = free_base(1)
    flags = ("--no-events", f"--grpc-port={port}", "--max-bytes-in-flight=1048576")
    with running(model, *flags, fake=True), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = stubs.SglangSchedulerStub(channel)
        large = asked([5] * 3000, stream=True, sampling={"max_new_tokens": 1000})
        held: list[Any] = []

        def fill() -> None:
            for _ in range(40):
                held.append(stub.Generate(large, timeout=60))
                next(held[-1])  # it runs, and its bytes are counted

        assert "memory" in refused(grpc.StatusCode.UNAVAILABLE, fill)
        assert len(held) > 2
        for call in held:
            call.cancel()


def test_a_draining_server_finishes_its_calls_and_refuses_others(model: Path) -> None:
    port = free_base(1)
    with (
        running(model, "--no-events", f"--grpc-port={port}", fake=True) as server,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub: Any = stubs.SglangSchedulerStub(channel)
        call = stub.Generate(asked([5, 6, 7], stream=True, sampling={"max_new_tokens": 300}), timeout=60)
        first = next(call)
        server.process.terminate()
        server.wait_for_log("SIGTERM: draining, 1 requests in flight")
        said = refused(grpc.StatusCode.UNAVAILABLE, lambda: list(stub.Generate(asked([5]), timeout=60)))
        assert "shutting down" in said
        rest = list(call)
        assert first.chunk.token_ids
        assert rest[-1].complete.finish_reason == "length"
        assert server.wait() == 0
