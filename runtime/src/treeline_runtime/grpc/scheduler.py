"""`sglang.grpc.scheduler.SglangScheduler`: SGLang's service for routers that tokenize and detokenize themselves."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Final

import grpc
import msgspec
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from msgspec.structs import replace

from treeline_runtime.args import ServerArgs
from treeline_runtime.download import repository
from treeline_runtime.grpc import scheduler_pb2 as pb
from treeline_runtime.grpc.calls import Context, generating, request_of, streaming, unary
from treeline_runtime.messages import TextLogprob, TextOut, decode_logprobs
from treeline_runtime.server.errors import ApiError, invalid, missing, unsupported
from treeline_runtime.server.jobs import GenerateTask
from treeline_runtime.server.limits import MAX_PROMPT_TOKENS
from treeline_runtime.server.openai import floor
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.sampling import MAX_LOGIT_BIAS
from treeline_runtime.server.service import Service

SERVICE: Final = "sglang.grpc.scheduler.SglangScheduler"
_REFUSED: Final = {
    "mm_inputs": "prompts are token ids alone",
    "token_ids_logprob": "use 'top_logprobs_num'",
    "return_hidden_states": "use /generate on a server started with --enable-return-hidden-states",
    "disaggregated_params": "prefill and decode run on the same server",
    "input_embeds": "prompts are token ids alone",
}
_ZERO_IS_UNSET: Final = ("top_p", "repetition_penalty", "n")
"""Sampling parameters whose zero is what protobuf has for nothing."""
_CONSTRAINTS: Final = {"ebnf_grammar": "ebnf"}
"""The names of constraints in `/generate`, where they differ."""


class SchedulerService:
    def __init__(self, service: Service, probes: Probes, args: ServerArgs) -> None:
        self._service = service
        self._probes = probes
        self._args = args
        self._started = time.time()

    @property
    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Generate": streaming(self._generate, pb.GenerateRequest),
            "Embed": unary(self._embed, pb.EmbedRequest),
            "HealthCheck": unary(self._health, pb.HealthCheckRequest),
            "Abort": unary(self._abort, pb.AbortRequest),
            "GetModelInfo": unary(self._model, pb.GetModelInfoRequest),
            "GetServerInfo": unary(self._server, pb.GetServerInfoRequest),
        }

    async def _generate(self, asked: pb.GenerateRequest, context: Context) -> AsyncGenerator[pb.GenerateResponse]:
        """With `stream`, chunks of new ids; then, or else alone, each generation's end with all of its ids."""
        async with generating(self._service, context, f"/{SERVICE}/Generate", _body(asked)) as (task, inflight):
            if not asked.stream:
                for index, out in enumerate(await self._service.collect(inflight)):
                    yield _complete(task, index, out, out.token_ids)
                return
            ids: list[list[int]] = [[] for _ in range(task.generations)]
            while ready := await inflight.next():
                for index, out in ready:
                    self._service.check_finish(out.finish)
                    ids[index] += out.token_ids
                    if not asked.return_logprob:
                        out = replace(out, logprobs=[])
                    if out.token_ids or out.logprobs:
                        yield pb.GenerateResponse(request_id=task.rid, chunk=_chunk(task, index, out))
                    if out.finish is not None:
                        yield _complete(task, index, replace(out, logprobs=[]), ids[index])

    async def _embed(self, _asked: pb.EmbedRequest, _context: Context) -> pb.EmbedResponse:
        raise ApiError(501, "Embed is not served over gRPC: POST /v1/embeddings")

    async def _health(self, _asked: pb.HealthCheckRequest, _context: Context) -> pb.HealthCheckResponse:
        """Generates a few tokens."""
        self._service.count_generating(1)
        try:
            await self._probes.health.check()
        except ApiError as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        finally:
            self._service.count_generating(-1)
        return pb.HealthCheckResponse(healthy=True, message="healthy")

    async def _abort(self, asked: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends the client's own request of this id; there may be none."""
        if not asked.request_id:
            raise missing("request_id")
        tenant = request_of(context.invocation_metadata()).tenant
        found = self._service.manager.abort(asked.request_id, tenant)
        return pb.AbortResponse(success=found, message="aborted" if found else "no such request is in flight")

    async def _model(self, _asked: pb.GetModelInfoRequest, _context: Context) -> pb.GetModelInfoResponse:
        service, limits = self._service, self._service.admit()
        return pb.GetModelInfoResponse(
            model_path=service.state.model_path or self._args.model,
            tokenizer_path=repository(self._args.model),
            is_generation=service.pooling is None,
            preferred_sampling_params=encode_json(msgspec.to_builtins(service.defaults)).decode(),
            weight_version=service.state.weight_version,
            served_model_name=service.model_name,
            max_context_length=limits.context_length,
            vocab_size=service.prompts.vocab_size,
            model_type=self._probes.model_type,
            max_req_input_len=limits.max_request_tokens - 1,
        )

    async def _server(self, _asked: pb.GetServerInfoRequest, _context: Context) -> pb.GetServerInfoResponse:
        state, started = self._service.state, Timestamp()
        started.FromNanoseconds(int(self._started * 1e9))
        return pb.GetServerInfoResponse(
            server_args=ParseDict(msgspec.to_builtins(self._args.public()), Struct()),
            active_requests=self._service.active,
            is_paused=bool(state.asleep) or state.pausing,
            uptime_seconds=time.time() - self._started,
            sglang_version=importlib.metadata.version("treeline-runtime"),
            server_type="grpc",
            start_time=started,
        )


def _body(asked: pb.GenerateRequest) -> dict[str, Any]:
    """The request as a body of `/generate`. Raises ApiError 400."""
    given = {field.name for field, _ in asked.ListFields()}
    for name, why in _REFUSED.items():
        if name in given:
            raise unsupported(name, why)
    if len(asked.tokenized.input_ids) > MAX_PROMPT_TOKENS:
        raise invalid("input_ids", f"more than {MAX_PROMPT_TOKENS} tokens")
    body: dict[str, Any] = {
        "input_ids": list(asked.tokenized.input_ids),
        "sampling_params": _sampling(asked.sampling_params) if "sampling_params" in given else {},
        "stream": asked.stream,
        "rid": asked.request_id or None,
        "custom_logit_processor": asked.custom_logit_processor or None,
        "lora_path": asked.lora_id or None,
        "data_parallel_rank": asked.data_parallel_rank if "data_parallel_rank" in given else None,
    }
    if asked.stream and asked.sampling_params.WhichOneof("constraint") is not None:
        body["return_logprob"] = True  # so that no id is replaced that has been sent
    if asked.return_logprob:
        body |= {"return_logprob": True, "logprob_start_len": asked.logprob_start_len}
        body["top_logprobs_num"] = asked.top_logprobs_num
    return {name: value for name, value in body.items() if value is not None}


def _sampling(asked: pb.SamplingParams) -> dict[str, Any]:
    """All of its numbers count, as SGLang's clients set all, except zeros that cannot be meant."""
    made: dict[str, Any] = {}
    for field in asked.DESCRIPTOR.fields:
        value = getattr(asked, field.name)
        if field.containing_oneof is not None and not asked.HasField(field.name):
            continue
        if field.is_repeated and len(value) > MAX_LOGIT_BIAS:
            raise invalid(f"sampling_params.{field.name}", f"more than {MAX_LOGIT_BIAS} entries")
        if field.is_repeated:
            value = dict(value) if field.name == "logit_bias" else list(value)
        elif field.message_type is not None:
            value = MessageToDict(value)
        if (value or field.name not in _ZERO_IS_UNSET) and value not in ([], {}):
            made[_CONSTRAINTS.get(field.name, field.name)] = value
    return made


def _chunk(task: GenerateTask, index: int, out: TextOut) -> pb.GenerateStreamChunk:
    output, input = _logprobs(out)
    return pb.GenerateStreamChunk(
        token_ids=out.token_ids,
        prompt_tokens=out.prompt_tokens,
        completion_tokens=out.completion_tokens,
        cached_tokens=0 if task.hides_cache else out.cached_tokens,
        output_logprobs=output,
        input_logprobs=input,
        index=index,
    )


def _complete(task: GenerateTask, index: int, out: TextOut, ids: Sequence[int]) -> pb.GenerateResponse:
    finish = out.finish
    assert finish is not None
    output, input = _logprobs(out)
    made = pb.GenerateComplete(
        output_ids=ids,
        finish_reason=finish.type,
        prompt_tokens=out.prompt_tokens,
        completion_tokens=out.completion_tokens,
        cached_tokens=0 if task.hides_cache else out.cached_tokens,
        output_logprobs=output,
        input_logprobs=input,
        index=index,
    )
    if isinstance(finish.matched, int):
        made.matched_token_id = finish.matched
    elif finish.matched is not None:
        made.matched_stop_str = finish.matched
    if out.speculated is not None:
        made.spec_draft_tokens, made.spec_accepted_tokens = out.speculated.guesses, out.speculated.right
    return pb.GenerateResponse(request_id=task.rid, complete=made)


def _logprobs(out: TextOut) -> tuple[pb.OutputLogProbs | None, pb.InputLogProbs | None]:
    """Log probabilities of the output and of the prompt; None without any."""
    output, input = pb.OutputLogProbs(), pb.InputLogProbs()
    for raw in out.logprobs:
        known = decode_logprobs(raw)
        for value, id, _ in known.output_tokens or ():
            output.token_logprobs.append(floor(value) or 0.0)
            output.token_ids.append(id)
        for value, id, _ in known.input_tokens or ():
            input.token_logprobs.append(pb.InputTokenLogProb(value=floor(value)))
            input.token_ids.append(id)
        output.top_logprobs.extend(map(_top, known.output_tops or ()))
        input.top_logprobs.extend(_top(tops or ()) for tops in known.input_tops or ())
    return output if output.token_ids else None, input if input.token_ids else None


def _top(tops: Iterable[TextLogprob]) -> pb.TopLogProbs:
    pairs = [(floor(value) or 0.0, id) for value, id, _ in tops]
    return pb.TopLogProbs(values=[value for value, _ in pairs], token_ids=[id for _, id in pairs])
