"""Bodies → tasks: parsed, checked, rendered, tokenized. A pure function of bytes, for any process.

All work that grows with the body is here, so that another process can read a large one without delaying others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import asdict, replace
from treeline_wire.apis import ollama
from treeline_wire.prompt import Prompt

from treeline_runtime.media.sources import PromptMedia, Source, checked, parts_of_native, read_sources
from treeline_runtime.messages import GenerateReq
from treeline_runtime.server import grammars, jobs, openai
from treeline_runtime.server import native_fields as native
from treeline_runtime.server.answers import Text, Tokens
from treeline_runtime.server.apis import ollama_fields, transcription_fields
from treeline_runtime.server.chat_reader import ApiReader, read_chat_task
from treeline_runtime.server.errors import (
    ApiError,
    UnknownModel,
    invalid,
    renamed,
    short,
    unsupported,
    wrong,
)
from treeline_runtime.server.fields import IGNORED, convert, json_object
from treeline_runtime.server.limits import MAX_ANSWER_BYTES, MAX_GENERATIONS, Limits
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.pooling_reader import PoolingReader
from treeline_runtime.server.tools import read_calls

RANK_FIELDS: Final = ("data_parallel_rank", "routed_dp_rank")
"""SGLang's fields of any body for the data-parallel rank."""
DEFAULT_MAX_TOKENS = 16
DEFAULT_MAX_NEW_TOKENS = 128
"""The default of `/generate`."""


@dataclass(frozen=True)
class Reader(openai.ModelFacts):
    """Reads requests for one model. Raises ApiError 400, or UnknownModel."""

    def read(self, kind: jobs.Kind, body: bytes | bytearray, limits: Limits | None, caller: jobs.Caller) -> jobs.Task:
        """`limits` may be None only for `tokenize` and `detokenize`. Raises NeedsWorkerError in an event loop, for a
        chat that needs another process.
        """
        readers: Mapping[jobs.Kind, Callable[[Mapping[str, Any], Any, jobs.Caller], jobs.Task]] = {
            "chat": lambda *read: read_chat_task(read[0], self, *read[1:]),
            "completion": self._completion,
            "generate": self._generate,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "embedding": lambda *read: PoolingReader(self, *read).embedding(),
            "pooling": lambda *read: PoolingReader(self, *read).pooling(),
            "classify": lambda *read: PoolingReader(self, *read).classify(),
            "score": lambda *read: PoolingReader(self, *read).score(),
            "rerank": lambda *read: PoolingReader(self, *read).rerank(),
            "responses": lambda *read: ApiReader(self, *read).responses(),
            "messages": lambda *read: ApiReader(self, *read).messages(),
            "count_tokens": lambda *read: ApiReader(self, *read).count_tokens(),
            "input_tokens": lambda *read: ApiReader(self, *read).input_tokens(),
            "transcription": self._transcription,
            "ollama_chat": lambda *read: self._ollama(ollama_fields.CHAT, *read),
            "ollama_generate": lambda *read: self._ollama(ollama_fields.GENERATE, *read),
        }
        noted = dict[str, None]()
        IGNORED.set(noted)
        grammars.STRICT.set(self.formats.strict_schemas)
        try:
            raw = transcription_fields.read_form(body) if kind == "transcription" else json_object(body)
            ranks = [(name, raw.pop(name)) for name in RANK_FIELDS if name in raw]
            if kind in ("ollama_chat", "ollama_generate") and isinstance(raw.get("model"), str):
                raw["model"] = ollama.without_tag(raw["model"], {self.name, *caller.adapters}.__contains__)
            adapter = self._take_adapter(raw, caller.adapters)
            if adapter is not None:
                caller = replace(caller, adapter=caller.adapters[adapter])
            task = readers[kind](raw, limits, caller)
        except RecursionError:
            raise ApiError(400, "The body is nested too deeply") from None
        except UnknownModel as error:
            raise UnknownModel(error.name, self.name, *sorted(caller.adapters)) from None
        if adapter is not None and isinstance(task, jobs.Generations):
            task = replace(task, model=adapter)
        for name, rank in ranks:
            if rank is None or limits is None or not isinstance(task, jobs.Generations):
                continue
            if caller.picked:
                noted[name] = None
            elif task.rank not in (None, limits.rank(rank, name)):
                raise invalid(name, f"another field names rank {task.rank}: leave one out")
            else:
                task = replace(task, rank=rank)
        return msgspec.structs.replace(task, ignored=tuple(noted)) if noted else task

    def _take_adapter(self, raw: dict[str, Any], adapters: Mapping[str, str]) -> str | None:
        """Takes the adapter out of a body, and names it: `model: NAME`, or SGLang's `BASE:NAME` and `lora_path`. Raises
        ApiError 404."""
        model, path = raw.get("model"), raw.get("lora_path")
        name, param = model if isinstance(model, str) else "", "model"
        if name not in adapters:
            name = name.removeprefix(f"{self.name}:")
        if name in adapters:
            raw["model"] = self.name
        elif adapters and isinstance(path, str) and path:
            name, param = path, "lora_path"
        else:
            return None
        raw.pop("lora_path", None)
        if name not in adapters:
            raise ApiError(404, f"No adapter is loaded as `{short(name)}`", param=param, code="model_not_found")
        if not adapters[name]:
            raise ApiError(404, f"The adapter `{short(name)}` is being unloaded", param=param, code="model_not_found")
        return name

    def _completion(self, raw: Mapping[str, Any], limits: Limits, caller: jobs.Caller) -> jobs.CompletionTask:
        body = openai.read_completion(raw, self)
        check_generations(raw.get("prompt"), body.n or 1, "prompt" if (body.n or 1) == 1 else "n")
        constraint = grammars.read_constraint(raw, grammars.FIELDS)
        processor = openai.processor(body)
        namespace = openai.namespace(raw, caller)
        prompts = self.prompts.of_prompts(openai.prompts_in(raw), limits, "prompt", namespace)
        requests = list[GenerateReq]()
        for ids in prompts:
            most = limits.max_new_tokens(len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, "prompt")
            sampling = openai.sampling(body, self, most, constraint, processor)
            requests.append(openai.request(body, ids, sampling, namespace, body.logprobs, echo=bool(body.echo)))
        task = jobs.CompletionTask(
            **openai.task_fields(body, caller, "cmpl", body.logprobs),
            prompts=requests,
            # Special tokens stay: they have a place in `logprobs.tokens`, and `text_offset` counts them.
            echoes=[self.prompts.decode(ids, skip_special_tokens=False) if body.echo else "" for ids in prompts],
        )
        task.check_copies()
        return task

    # ---- Ollama's -------------------------------------------------------------------------------------------

    def _ollama(
        self, api: ollama_fields.Api, raw: Mapping[str, Any], limits: Limits, caller: jobs.Caller
    ) -> jobs.ChatTask | jobs.Answered:
        body, options = ollama_fields.read_ollama(raw, api)
        self.check_model(body.model)
        if not raw.get(api.prompt):  # what clients send to load a model
            loaded = ollama_fields.answer(self.name, chat=api is ollama_fields.CHAT, done=True, done_reason="load")
            return jobs.Answered(body=encode_json(loaded))
        more = ollama_fields.chat_fields(body, options)
        if raw.get("raw"):
            with renamed(api.NAMES, api.MEMBERS):
                text = self._completion({"prompt": raw["prompt"], "max_tokens": 1, **more}, limits, caller)
            task = jobs.ChatTask(**{name: getattr(text, name) for name in jobs.TextTask.__struct_fields__})
        else:
            task = ApiReader(self, raw, limits, caller).chat(api.convert, api.prompt, api, more, body.stream)
        most = limits.max_new_tokens(task.prompt_tokens, None, None, api.prompt)
        if options.num_predict is not None and options.num_predict > 0:
            most = min(most, options.num_predict)
        return replace(task.sampled(max_new_tokens=most), stream=body.stream is not False)

    def _transcription(self, raw: Mapping[str, Any], limits: Limits, caller: jobs.Caller) -> jobs.TranscriptTask:
        body = transcription_fields.TranscriptionBody.read(raw)
        self.check_model(body.model)
        if self.media is None or "audio" not in self.media.kinds:
            raise unsupported("file", "this model reads no recordings")
        reader, chat = ApiReader(self, raw, limits, caller), transcription_fields.chat_of(body)
        task = reader.task_of(chat, "file", transcription_fields, body.stream)
        return jobs.TranscriptTask(
            **asdict(task), format=body.response_format or "json", knows_language=bool(body.language)
        )

    # ---- SGLang's own ---------------------------------------------------------------------------------------

    def _generate(self, raw: Mapping[str, Any], limits: Limits, caller: jobs.Caller) -> jobs.GenerateTask:
        body = native.GenerateBody.read(raw)
        namespace = openai.namespace(raw, caller)
        prompts, sources, batched = self._native_prompts(raw, body, limits, namespace)
        requests, media, n = self._requests(body, prompts, sources, limits, namespace)
        check_generations(prompts, n, "sampling_params.n")
        rids = body.rid if isinstance(body.rid, list) else None
        if rids is not None and len(rids) != len(requests) * n:
            raise wrong("rid", f"{len(rids)} rids for {len(requests) * n} generations")
        if rids is not None and len(set(rids)) < len(rids):
            twice = next(rid for index, rid in enumerate(rids) if rid in rids[:index])
            raise wrong("rid", f"rid {twice!r} is given twice")
        if body.stream and body.return_hidden_states:
            raise wrong("return_hidden_states", "Hidden states come with whole answers, not with streams")
        task = jobs.GenerateTask(
            rid=body.rid if isinstance(body.rid, str) else openai.new_rid("gen"),
            prompts=requests,
            n=n,
            rids=rids,
            hides_cache=caller.shares_cache,
            stream=bool(body.stream),
            batched=batched,
            with_text=bool(body.return_text_in_logprobs),
            media=checked(media, requests),
        )
        task.check_copies()
        return task

    def _native_prompts(
        self, raw: Mapping[str, Any], body: native.GenerateBody, limits: Limits, namespace: str | None
    ) -> tuple[list[list[int]], list[tuple[Source, ...]], bool]:
        """The prompts as ids, the images of each, and whether the request was a batch."""
        if (body.text is None) == (body.input_ids is None):
            raise wrong("text", "Give exactly one of 'text' and 'input_ids'")
        name = "text" if body.text is not None else "input_ids"
        value = body.text if body.text is not None else body.input_ids
        check_generations(value, 1, name)
        prompts = openai.prompts_in({"prompt": value}, name)
        if name == "input_ids" and any(prompt.ids is None for prompt in prompts):
            raise wrong("input_ids", "'input_ids' holds token ids, not text")
        batched = isinstance(value, list) and bool(value) and not isinstance(value[0], int | float)
        media = parts_of_native(body, len(prompts), batched)
        prompts = [replace(prompt, media=parts) for prompt, parts in zip(prompts, media, strict=True)]
        sources = read_sources(raw, media, self.media, bare=True)
        return self.prompts.of_prompts(prompts, limits, name, namespace), sources, batched

    def _requests(
        self,
        body: native.GenerateBody,
        prompts: list[list[int]],
        sources: list[tuple[Source, ...]],
        limits: Limits,
        namespace: str | None,
    ) -> tuple[list[GenerateReq], list[PromptMedia], int]:
        """The request for each prompt, its images, and `n`, which must be the same for all."""
        count, media = len(prompts), list[PromptMedia]()
        columns = zip(
            prompts, sources, *(native.of_each(getattr(body, name), count, name) for name in _OF_EACH), strict=True
        )
        made: list[GenerateReq] = []
        ns: set[int] = set()
        last, fields = None, native.read_sampling({})
        for ids, images, params, processor, custom, logprob, start, top in columns:
            if params is not last:  # what counts for all is read once
                last, fields = params, native.read_sampling({} if params is None else params)
            typed, constraint = fields
            media.append(PromptMedia(images, typed.max_new_tokens))
            sampling = typed.params(
                self.defaults,
                self.prompts,
                max_new_tokens=limits.max_new_tokens(len(ids), typed.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, "text"),
                min_new_tokens=typed.min_new_tokens,
                seed=typed.sampling_seed,
                min_param="sampling_params.min_new_tokens",
                where="sampling_params.",
                constraint=constraint,
                processor=native.read_processor(typed, processor, custom),
            )
            if start is not None and start > len(ids):
                raise wrong(
                    "logprob_start_len", f"'logprob_start_len' is {start}, but the prompt has {len(ids)} tokens"
                )
            if start is None:  # of a prompt alone, log probabilities can only be its own
                start = 0 if logprob and not sampling.max_new_tokens else -1
            made.append(
                GenerateReq(
                    "",
                    ids,
                    sampling,
                    namespace,
                    return_logprob=bool(logprob),
                    logprob_start_len=start,
                    top_logprobs_num=top or 0,
                    priority=body.priority or 0,
                    return_hidden_states=bool(body.return_hidden_states),
                )
            )
            ns.add(typed.n or 1)
        if len(ns) > 1:
            raise wrong("sampling_params.n", "'n' must be the same for all prompts of a batch")
        return made, media, ns.pop()

    # ---- texts and ids --------------------------------------------------------------------------------------

    def _tokenize(self, raw: Mapping[str, Any], limits: Limits | None, caller: jobs.Caller) -> jobs.Answered:
        """`{"prompt": text or texts}`, or `{"messages": …}` as in a chat → `tokens`, `count`, `max_model_len`."""
        body = native.TokenizeBody.read(raw)
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise wrong("prompt", "Give exactly one of 'prompt' and 'messages'")
        if body.messages is not None:
            read_calls(raw)
            tokens: Any = self.prompts.of_chat(raw, limits, openai.namespace(raw, caller))
            count: Any = len(tokens)
        else:
            single = isinstance(body.prompt, str)
            texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
            check_generations(texts, 1, "prompt")
            special = body.add_special_tokens is not False
            prompts = [Prompt(text=openai.encodable(text), add_special_tokens=special) for text in texts]
            lists = self.prompts.of_prompts(prompts, limits, namespace=openai.namespace(raw, caller))
            tokens = lists[0] if single else lists
            count = len(lists[0]) if single else [len(ids) for ids in lists]
        limit = limits.context_length if limits is not None else None
        return jobs.Answered(encode_json(Tokens(tokens, count, limit)))

    def _detokenize(self, raw: Mapping[str, Any], _limits: Limits | None, _caller: jobs.Caller) -> jobs.Answered:
        """`{"tokens": ids or lists of ids}` → `text`."""
        body = native.DetokenizeBody.read(raw)
        self.check_model(body.model)
        skip = body.skip_special_tokens is not False
        check_generations(body.tokens, 1, "tokens")
        if body.tokens and isinstance(body.tokens[0], list):
            lists = convert(raw, native.ManyLists).tokens
            return jobs.Answered(encode_json(Text(self._texts(lists, skip))))
        return jobs.Answered(encode_json(Text(self._texts([convert(raw, native.OneList).tokens], skip)[0])))

    def _texts(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        size = 0
        for ids in lists:
            if ids and max(ids) >= self.prompts.vocab_size:
                raise wrong("tokens", f"Token id {max(ids)} is not below {self.prompts.vocab_size}")
            size += self.prompts.size_of(ids)
            if size > MAX_ANSWER_BYTES:
                raise wrong(
                    "tokens", f"The text may be longer than {MAX_ANSWER_BYTES} bytes; send fewer tokens at once"
                )
        return [self.prompts.decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists]


_OF_EACH: Final = (
    *("sampling_params", "custom_logit_processor", "custom_params"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num"),
)
"""Fields of `/generate` that may have a value for each prompt."""


def check_generations(prompts: Any, n: int, param: str) -> None:
    """Raises ApiError 400 for too many prompts, before any work for each."""
    several = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)
    if (len(prompts) if several else 1) * n > MAX_GENERATIONS:
        raise wrong(param, f"More than {MAX_GENERATIONS} prompts, or choices of them, in one request")
