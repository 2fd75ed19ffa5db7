"""Bodies of requests for vectors → what they ask for, as `reader` does it for text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from treeline_wire.prompt import PromptError, prompt_of_completion

from treeline_runtime.messages import SamplingParams
from treeline_runtime.server import openai
from treeline_runtime.server import pooling_fields as fields
from treeline_runtime.server.fields import check_unknown, convert
from treeline_runtime.server.http import ApiError
from treeline_runtime.server.jobs import (
    Caller,
    ClassifyTask,
    GenerationJob,
    PromptSpec,
    RerankTask,
    ScoreTask,
    VectorsTask,
)
from treeline_runtime.server.limits import MAX_INPUTS, Limits

if TYPE_CHECKING:
    from treeline_runtime.models.pooling import Pooling
    from treeline_runtime.server.prompts import Prompts
    from treeline_runtime.server.reader import Reader

T = TypeVar("T", bound=fields.PoolingFields)
Raw = Mapping[str, Any]
InputsOrChat = fields.PoolingBody | fields.ClassifyBody
_NOTHING = SamplingParams(max_new_tokens=0)


def check_template(pooling: Pooling | None, prompts: Prompts) -> None:
    """Raises ValueError for a language model that reranks, but cannot be asked."""
    if pooling is not None and pooling.answers and not prompts.knows_pairs:
        raise ValueError(
            "a language model that reranks (LogitScore) needs a chat template (chat_template.jinja) for messages of "
            "the roles query and document"
        )


def embedding(reader: Reader, raw: Raw, limits: Limits, caller: Caller) -> VectorsTask:
    body = _read(reader, raw, fields.EmbeddingBody)
    job = _job(body, "embd", _inputs(reader, body, limits, openai.namespace(raw, caller)), raw, caller)
    return VectorsTask(job, body.encoding_format == "base64", body.dimensions)


def pooling(reader: Reader, raw: Raw, limits: Limits, caller: Caller) -> VectorsTask:
    body = _read(reader, raw, fields.PoolingBody)
    job = _job(body, "pool", _inputs_or_chat(reader, body, raw, limits, openai.namespace(raw, caller)), raw, caller)
    return VectorsTask(job, body.encoding_format == "base64")


def classify(reader: Reader, raw: Raw, limits: Limits, caller: Caller) -> ClassifyTask:
    body = _read(reader, raw, fields.ClassifyBody)
    job = _job(body, "classify", _inputs_or_chat(reader, body, raw, limits, openai.namespace(raw, caller)), raw, caller)
    return ClassifyTask(job, body.use_activation is not False)


def score(reader: Reader, raw: Raw, limits: Limits, caller: Caller) -> ScoreTask:
    body = _read(reader, raw, fields.ScoreBody)
    first = _texts([body.text_1] if isinstance(body.text_1, str) else body.text_1, "text_1")
    second = _texts([body.text_2] if isinstance(body.text_2, str) else body.text_2, "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ApiError(400, f"{len(first)} texts in 'text_1' for {len(second)} in 'text_2'", param="text_1")
    prompts = _pairs(
        reader, list(zip(first, second, strict=True)), body.instruct, limits, "text_2", openai.namespace(raw, caller)
    )
    return ScoreTask(_job(body, "score", prompts, raw, caller), body.use_activation is not False)


def rerank(reader: Reader, raw: Raw, limits: Limits, caller: Caller) -> RerankTask:
    body = _read(reader, raw, fields.RerankBody)
    (query,) = _texts([body.query], "query")
    documents = _texts([one if isinstance(one, str) else one.text for one in body.documents], "documents")
    prompts = _pairs(
        reader,
        [(query, document) for document in documents],
        body.instruct,
        limits,
        "documents",
        openai.namespace(raw, caller),
    )
    return RerankTask(
        _job(body, "rerank", prompts, raw, caller),
        body.use_activation is not False,
        body.top_n,
        None if body.return_documents is False else documents,
    )


def _read(reader: Reader, raw: Raw, type: type[T]) -> T:
    check_unknown(raw, fields.known(type))
    body = convert(raw, type)
    reader.check_model(body.model)
    return body


def _job(body: fields.PoolingFields, kind: str, prompts: list[list[int]], raw: Raw, caller: Caller) -> GenerationJob:
    return GenerationJob(
        body.rid or openai.new_rid(kind),
        [PromptSpec(ids, _NOTHING) for ids in prompts],
        namespace=openai.namespace(raw, caller),
        tenant=caller.tenant,
        hides_cache=caller.shares_cache,
        pools=True,
    )


def _inputs(
    reader: Reader, body: fields.EmbeddingBody | InputsOrChat, limits: Limits, namespace: str | None
) -> list[list[int]]:
    """OpenAI's `input`: a text or its token ids, or several of them."""
    value = body.input
    if value is None:
        raise ApiError(400, "Missing required parameter: 'input'", param="input", code="missing_required_parameter")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        _check_count(value, "input")
    try:
        prompts = prompt_of_completion({"prompt": value, "add_special_tokens": body.add_special_tokens})
    except PromptError as error:
        raise ApiError(400, f"Invalid value for 'input': {error}", param="input") from None
    if any(prompt.text == "" for prompt in prompts):
        raise ApiError(400, "Invalid value for 'input': must not be an empty string", param="input")
    return _fitting(reader.prompts.of_prompts(prompts, limits, "input", namespace), limits, "input")


def _inputs_or_chat(
    reader: Reader, body: InputsOrChat, raw: Raw, limits: Limits, namespace: str | None
) -> list[list[int]]:
    if (body.input is None) == (body.messages is None):
        raise ApiError(400, "Give exactly one of 'input' and 'messages'", param="input")
    if body.messages is None:
        for name in openai.TEMPLATE_FIELDS & raw.keys():
            check_unknown({name: raw[name]}, ())  # nothing is rendered
        return _inputs(reader, body, limits, namespace)
    if body.add_special_tokens:
        problem = "'add_special_tokens' is for 'input': a chat template writes its own"
        raise ApiError(400, problem, param="add_special_tokens")
    # what is judged is there: nobody goes on with it, unless the client says so
    asked = {**raw, "add_generation_prompt": raw.get("add_generation_prompt") or False}
    return _fitting([reader.prompts.of_chat(asked, limits, namespace)], limits, "messages")


def _pairs(
    reader: Reader,
    pairs: Sequence[tuple[str, str]],
    instruct: str | None,
    limits: Limits,
    param: str,
    namespace: str | None,
) -> list[list[int]]:
    generates = reader.pooling is not None and bool(reader.pooling.answers)
    if instruct is not None:
        _check_text(instruct, "instruct")
    prompts = reader.prompts.of_pairs(
        pairs, limits, param, namespace, instruct=instruct, add_generation_prompt=generates
    )
    return _fitting(prompts, limits, param)


def _fitting(prompts: list[list[int]], limits: Limits, param: str) -> list[list[int]]:
    for ids in prompts:
        limits.max_new_tokens(len(ids), 0, None, param)
    return prompts


def _texts(texts: list[str], param: str) -> list[str]:
    if not texts:
        raise ApiError(400, f"Invalid value for {param!r}: must not be an empty list", param=param)
    _check_count(texts, param)
    for text in texts:
        _check_text(text, param)
    return texts


def _check_text(text: str, param: str) -> None:
    if not text:
        raise ApiError(400, f"Invalid value for {param!r}: must not be an empty string", param=param)


def _check_count(values: Sequence[object], param: str) -> None:
    if len(values) > MAX_INPUTS:
        raise ApiError(400, f"{len(values)} in {param!r}: at most {MAX_INPUTS} in one request", param=param)
