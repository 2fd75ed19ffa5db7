"""A small correct picker on grpc.aio, with optional flaws: the conformance suite is tested on it. It serves full duplex
alone and knows its endpoints from the start."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format
from treeline_wire import envoy_pb2 as pb

LB, DESTINATION = "envoy.lb", "x-gateway-destination-endpoint"
HINT, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
CHUNK = 62_000
ACTIONS = {"adds if absent": 1, "overwrites if there": 3}


class Refused(Exception):
    """An answer to the client, by status."""


class FlawedPicker:
    """`flaws` are names that the code below checks for; without any it is correct."""

    def __init__(self, endpoints: Sequence[str], *flaws: str) -> None:
        self.endpoints = list(endpoints)
        self.flaws = set(flaws)
        self._turn = itertools.count()
        self._open = dict.fromkeys(self.endpoints, 0)
        self._went: dict[bytes, str] = {}

    async def process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        leases: list[str] = []
        try:
            async for answer in self._answers(requests, context, leases):
                yield answer
        finally:
            if "leaks leases" not in self.flaws:
                self._release(leases)

    def _release(self, leases: list[str]) -> None:
        while leases:
            self._open[leases.pop()] -= 1

    async def _answers(self, requests: AsyncIterator[Any], context: Any, leases: list[str]) -> AsyncIterator[Any]:
        body, hint, decided = b"", None, False
        if "hangs up" in self.flaws:
            return
        async for request in requests:
            if "silent" in self.flaws:
                continue
            while "endless" in self.flaws:
                yield _streamed(b"x" * CHUNK, False)
            kind = request.WhichOneof("request")
            hint = _hint_of(request, hint)
            if kind == "request_body" and not decided:
                body += request.request_body.body
                if "answers early" in self.flaws:
                    yield pb.ProcessingResponse(request_body=pb.BodyResponse())
            ends = kind == "request_trailers" or getattr(getattr(request, kind), "end_of_stream", False)
            if kind.startswith("request") and ends and not decided:
                decided = True
                try:
                    answers = self._decide(kind, body, hint, leases)
                except Refused as refusal:
                    if "grpc status" in self.flaws:
                        await context.abort(grpc.StatusCode.INTERNAL, "no pods")
                    yield _immediate(int(str(refusal)))
                    return
                for answer in answers:
                    yield answer
            elif kind.startswith("response"):
                self._release(leases)
                for answer in self._echo(kind, request):
                    yield answer

    def _decide(self, kind: str, body: bytes, hint: list[str] | None, leases: list[str]) -> list[Any]:
        allowed = [one for one in self.endpoints if hint is None or one in hint or "ignores subsets" in self.flaws]
        if not allowed:
            raise Refused(503)
        if kind == "request_body":
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(body)
                body = json.dumps(found).encode() if "writes anew" in self.flaws else body
        turn = next(self._turn)
        chosen = min(allowed, key=lambda one: (self._open.get(one, 0), (self.endpoints.index(one) - turn) % 7))
        if len(body) > 8192 and "no affinity" not in self.flaws:
            chosen = self._went.setdefault(body[:8192], chosen)
        leases.append(chosen)
        self._open[chosen] += 1
        trailers = kind == "request_trailers"
        answers = [self._headers(chosen, None if kind == "request_headers" else len(body))]
        if kind != "request_headers":
            answers += self._chunks(body, ends=not trailers)
        if trailers and "forgets trailers" not in self.flaws:
            answers.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        return answers[::-1] if "wrong order" in self.flaws else answers

    def _headers(self, chosen: str, length: int | None) -> Any:
        response = pb.ProcessingResponse()
        common = response.request_headers.response
        common.clear_route_cache = True
        fields = {DESTINATION: chosen} | ({} if length is None else {"content-length": str(length)})
        for key, value in fields.items():
            option = pb.HeaderValueOption(header=pb.HeaderValue(key=key, raw_value=value.encode()))
            if "value" in self.flaws:
                option.header.value, option.header.raw_value = value, b""
            option.append.value = "appends" in self.flaws
            option.append_action = next((at for name, at in ACTIONS.items() if name in self.flaws), 0)
            common.header_mutation.set_headers.append(option)
        told = "192.0.2.1:80" if "metadata differs" in self.flaws else chosen
        if "no metadata" not in self.flaws:
            response.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value = told
        return response

    def _chunks(self, body: bytes, *, ends: bool) -> list[Any]:
        size = 1 << 20 if "long chunks" in self.flaws else CHUNK
        body = body[:-1] if "loses a byte" in self.flaws else body
        parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        everywhere = "ends often" in self.flaws
        return [_streamed(part, ends and (everywhere or at == len(parts) - 1)) for at, part in enumerate(parts)]

    def _echo(self, kind: str, request: Any) -> list[Any]:
        if kind != "response_body":
            return [pb.ProcessingResponse(**{kind: getattr(pb.ProcessingResponse(), kind)})]
        part = request.response_body
        pieces = [part.body[at : at + CHUNK] for at in range(0, len(part.body), CHUNK)] or [b""]
        found = []
        for at, piece in enumerate(pieces):
            response = pb.ProcessingResponse()
            streamed = response.response_body.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = piece, part.end_of_stream and at == len(pieces) - 1
            found.append(response)
        return found


def _hint_of(request: Any, before: list[str] | None) -> list[str] | None:
    fields = request.metadata_context.filter_metadata[HINT].fields
    if SUBSET not in fields:
        return before
    value = json_format.MessageToDict(fields[SUBSET])
    return [str(one) for one in value] if isinstance(value, list) else []


def _streamed(data: bytes, end: bool) -> Any:
    response = pb.ProcessingResponse()
    streamed = response.request_body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = data, end
    return response


def _immediate(status: int) -> Any:
    response = pb.ProcessingResponse()
    response.immediate_response.status.code = status
    response.immediate_response.body = b"why"
    return response


def _garbage(_: Any) -> bytes:
    return b"\xff" * 100


@contextlib.asynccontextmanager
async def serving(picker: FlawedPicker) -> AsyncIterator[int]:
    """Run the picker on a port of its own."""
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=_garbage if "garbage" in picker.flaws else pb.ProcessingResponse.SerializeToString,
    )
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Process": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
