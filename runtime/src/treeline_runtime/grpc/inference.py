"""`inference.GRPCInferenceService`: KServe's Open Inference Protocol, and Triton's stream of it, with texts.

The tensors are those of the backends of vLLM and TensorRT-LLM for Triton: `text_input`, and `text_output`. Sampling
parameters have the names of `/generate`, and come as parameters of the request, as tensors with one element, or as JSON
in the tensor `sampling_parameters`.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import grpc
import numpy as np

from treeline_runtime.grpc import inference_pb2 as pb
from treeline_runtime.grpc.calls import Context, generating, streaming, told, unary
from treeline_runtime.messages import TextOut
from treeline_runtime.server.errors import ApiError, UnknownModel, invalid, missing, unsupported
from treeline_runtime.server.fields import json_object
from treeline_runtime.server.limits import MAX_CONTROL_BYTES, MAX_GENERATIONS
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.service import Service

SERVICE: Final = "inference.GRPCInferenceService"
OPEN: Final = frozenset({f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady"})
"""Methods that need no key, like the probes over HTTP."""
_TYPES: Final[Mapping[str, tuple[str, str]]] = {
    "BYTES": ("bytes_contents", ""),
    "BOOL": ("bool_contents", "?"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
}
"""Data type → its member of contents, and its elements as raw contents."""
_NAMES: Final = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "random_seed": "sampling_seed",
    "stop_words": "stop",
}
"""Other names of sampling parameters: vLLM's and TensorRT-LLM's."""
_FLOATS: Final = frozenset(
    {"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
)
"""Numbers that may be texts, since KServe's parameters have none with a fraction."""
_TRITONS: Final = "triton_"
"""The beginning of parameters about the protocol, such as empty final responses, which there are none of."""
MAX_NAMED: Final = 64
"""The most tensors or parameters of a request, and dimensions of a tensor."""
_INPUTS: Final = ("text_input", "sampling_parameters")
_OUTPUTS: Final = ("text_output", "finish_reason")


class _Asked(NamedTuple):
    """A request, read."""

    body: dict[str, Any]
    """Of `/generate`."""
    begins: list[str]
    """What the outputs of each prompt begin with."""


class InferenceService:
    def __init__(self, service: Service, probes: Probes) -> None:
        self._service = service
        self._probes = probes

    @property
    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "ServerLive": unary(self._live, pb.ServerLiveRequest, empty=True),
            "ServerReady": unary(self._ready, pb.ServerReadyRequest, empty=True),
            "ModelReady": unary(self._model_ready, pb.ModelReadyRequest),
            "ServerMetadata": unary(self._server, pb.ServerMetadataRequest),
            "ModelMetadata": unary(self._model, pb.ModelMetadataRequest),
            "ModelInfer": unary(self._infer, pb.ModelInferRequest),
            "ModelStreamInfer": streaming(self._stream, pb.ModelInferRequest, both=True),
        }

    # ---- the server and its model ---------------------------------------------------------------------------

    async def _live(self, _asked: pb.ServerLiveRequest, _context: Context) -> pb.ServerLiveResponse:
        try:
            await self._probes.live()
        except ApiError:
            return pb.ServerLiveResponse(live=False)
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, _asked: pb.ServerReadyRequest, _context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._is_ready())

    async def _model_ready(self, asked: pb.ModelReadyRequest, _context: Context) -> pb.ModelReadyResponse:
        self._adapter(asked.name)
        return pb.ModelReadyResponse(ready=await self._is_ready())

    async def _is_ready(self) -> bool:
        try:
            await self._probes.ready()
        except ApiError:
            return False
        return True

    async def _server(self, _asked: pb.ServerMetadataRequest, _context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="treeline", version=importlib.metadata.version("treeline-runtime"))

    async def _model(self, asked: pb.ModelMetadataRequest, _context: Context) -> pb.ModelMetadataResponse:
        self._adapter(asked.name)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        inputs, outputs = ([tensor(name=name, datatype="BYTES", shape=[-1]) for name in names] for names in _TENSORS)
        return pb.ModelMetadataResponse(name=asked.name, platform="treeline", inputs=inputs, outputs=outputs)

    def _adapter(self, name: str) -> str | None:
        """The adapter of a model's name; None for the model itself. Raises UnknownModel."""
        served = [model.id for model in self._probes.served]
        if name and name not in served:
            raise UnknownModel(name, *served)
        return None if name in ("", self._service.model_name) else name

    # ---- inference ------------------------------------------------------------------------------------------

    async def _infer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        asked = self._read(request)
        if asked.body["stream"]:
            raise unsupported("stream", "ModelInfer has one answer: use ModelStreamInfer")
        return await self._whole(request, asked, context, "ModelInfer")

    async def _stream(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse]:
        """Answers the requests in their order. An error ends its request, not the stream."""
        async for request in requests:
            try:
                asked = self._read(request)
                if not asked.body["stream"]:
                    whole = await self._whole(request, asked, context, "ModelStreamInfer")
                    yield pb.ModelStreamInferResponse(infer_response=whole)
                    continue
                async with aclosing(self._parts(request, asked, context)) as parts:
                    async for part in parts:
                        yield pb.ModelStreamInferResponse(infer_response=part)
            except Exception as error:
                about = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
                yield pb.ModelStreamInferResponse(error_message=told(error).told["message"], infer_response=about)

    async def _whole(
        self, request: pb.ModelInferRequest, asked: _Asked, context: Context, method: str
    ) -> pb.ModelInferResponse:
        async with generating(self._service, context, f"/{SERVICE}/{method}", asked.body) as (task, inflight):
            outs = await self._service.collect(inflight)
        return _response(request, outs, [begin for begin in asked.begins for _ in range(task.n)], last=True)

    async def _parts(
        self, request: pb.ModelInferRequest, asked: _Asked, context: Context
    ) -> AsyncGenerator[pb.ModelInferResponse]:
        """The answer as it comes: new texts, and which generation they are of."""
        async with generating(self._service, context, f"/{SERVICE}/ModelStreamInfer", asked.body) as (task, inflight):
            left, begins = task.generations, [begin for begin in asked.begins for _ in range(task.n)]
            while ready := await inflight.next():
                for index, out in ready:
                    self._service.check_finish(out.finish)
                    left -= out.finish is not None
                    part = _response(request, [out], [begins[index]], last=not left)
                    part.parameters["index"].int64_param = index
                    begins[index] = ""
                    yield part

    def _read(self, request: pb.ModelInferRequest) -> _Asked:
        """Raises ApiError 400 or 404."""
        if max(len(request.inputs), len(request.parameters), len(request.outputs)) > MAX_NAMED:
            raise invalid("inputs", f"more than {MAX_NAMED} tensors or parameters")
        tensors = _elements(request)
        adapter = self._adapter(request.model_name)
        if not tensors.get("text_input"):
            raise missing("text_input")
        texts = [_text(one, "text_input") for one in tensors.pop("text_input")]
        stream, alone = (_only(tensors.pop(name, [default]), name) for name, default in _FLAGS)
        written = tensors.pop("sampling_parameters", None)
        parameters = ((name, one) for name, one in request.parameters.items() if not name.startswith(_TRITONS))
        given = {name: _value(one) for name, one in parameters}
        given |= {name: _only(elements, name) for name, elements in tensors.items()}
        given |= {} if written is None else _written(_only(written, "sampling_parameters"))
        priority = given.pop("priority", None)
        body = {
            "text": texts,
            "stream": bool(stream),
            "sampling_params": dict(map(_sampling, given.items())),
            "rid": request.id or None,
            "lora_path": adapter,
            "priority": priority,
        }
        for wanted in request.outputs:
            if wanted.name not in _OUTPUTS:
                raise invalid("outputs", f"there is no {wanted.name!r}: expected one of {', '.join(_OUTPUTS)}")
        return _Asked(
            {name: value for name, value in body.items() if value is not None}, [""] * len(texts) if alone else texts
        )


_TENSORS: Final = (_INPUTS, _OUTPUTS)
_FLAGS: Final = (("stream", False), ("exclude_input_in_output", True))


def _elements(request: pb.ModelInferRequest) -> dict[str, list[Any]]:
    """The elements of each tensor by its name. Raises ApiError 400."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid("raw_input_contents", f"there are {len(raw)} for {len(request.inputs)} inputs")
    found = dict[str, list[Any]]()
    for i, tensor in enumerate(request.inputs):
        if tensor.datatype not in _TYPES:
            raise invalid(f"inputs.{tensor.name}", f"expected a datatype of {', '.join(_TYPES)}")
        member, kind = _TYPES[tensor.datatype]
        given = len(getattr(tensor.contents, member))
        if len(tensor.shape) > MAX_NAMED or max(given, math.prod(tensor.shape)) > MAX_GENERATIONS:
            raise invalid(f"inputs.{tensor.name}", f"more than {MAX_GENERATIONS} elements, or {MAX_NAMED} dimensions")
        if not raw:
            elements = list(getattr(tensor.contents, member))
        elif not kind:
            elements = _framed(raw[i], tensor.name)
        elif len(raw[i]) != np.dtype(kind).itemsize * math.prod(tensor.shape):
            raise invalid(f"inputs.{tensor.name}", f"its contents do not have the shape {[*tensor.shape]}")
        else:
            elements = np.frombuffer(raw[i], kind).tolist()
        if len(elements) != math.prod(tensor.shape):
            raise invalid(f"inputs.{tensor.name}", f"{len(elements)} elements do not have the shape {[*tensor.shape]}")
        found[tensor.name] = elements
    return found


def _framed(raw: bytes, name: str) -> list[bytes]:
    """Elements of BYTES, each after its size."""
    found, at = list[bytes](), 0
    while at < len(raw) and len(found) <= MAX_GENERATIONS:
        size = int.from_bytes(raw[at : at + 4], "little")
        if at + 4 + size > len(raw):
            raise invalid(f"inputs.{name}", "its contents end inside an element")
        found.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def _only(elements: Sequence[Any], name: str) -> Any:
    if len(elements) != 1:
        raise invalid(f"inputs.{name}", "expected one element")
    return elements[0]


def _written(text: Any) -> dict[str, Any]:
    if not isinstance(text, bytes) or len(text) > MAX_CONTROL_BYTES:
        raise invalid("sampling_parameters", f"expected JSON of at most {MAX_CONTROL_BYTES} bytes")
    return json_object(text)


def _text(value: Any, name: str) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise invalid(name, "it is not UTF-8") from None


def _value(parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _sampling(given: tuple[str, Any]) -> tuple[str, Any]:
    """A parameter by the name and with the type of `/generate`."""
    name, value = given[0], _text(given[1], given[0])
    if name in _FLOATS and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise invalid(name, "expected a number") from None
    return _NAMES.get(name, name), value


def _response(
    request: pb.ModelInferRequest, outs: Sequence[TextOut], begins: Sequence[str], *, last: bool
) -> pb.ModelInferResponse:
    """The outputs that the request wants, in the form of its inputs."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    made = {
        "text_output": [(begin + out.text).encode() for begin, out in zip(begins, outs, strict=True)],
        "finish_reason": [b"" if out.finish is None else out.finish.type.encode() for out in outs],
    }
    for name in dict.fromkeys([wanted.name for wanted in request.outputs] or _OUTPUTS):
        output = response.outputs.add(name=name, datatype="BYTES", shape=[len(outs)])
        if request.raw_input_contents:
            framed = (len(one).to_bytes(4, "little") + one for one in made[name])
            response.raw_output_contents.append(b"".join(framed))
        else:
            output.contents.bytes_contents.extend(made[name])
    response.parameters["prompt_tokens"].int64_param = sum(out.prompt_tokens for out in outs)
    response.parameters["completion_tokens"].int64_param = sum(out.completion_tokens for out in outs)
    response.parameters["triton_final_response"].bool_param = last
    return response
