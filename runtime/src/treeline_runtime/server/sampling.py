"""A request's sampling fields → SamplingParams: ranges, and defaults.

generation_config.json is read like config.json: known keys are used or have no effect; keys that would change answers
but are unsupported are refused by name (`--sampling-defaults openai` ignores the file).

Also the fields for a logit processor → CustomProcessor. Pure functions.

SGLang 0.5.23 has `custom_logit_processor` and `custom_params` at the top level of chats and completions; in `/generate`
the first there, the second in `sampling_params`; its processors are pickled classes. vLLM 0.32 names processors at
start and gives each all requests' `vllm_xargs`. Here a request names one given at start; the scheduler knows whether it
exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.logit_processors import MAX_NAME_CHARS, is_name
from treeline_runtime.messages import LARGEST_PRIORITY, MAX_STOP_TOKEN_IDS, CustomProcessor, SamplingParams
from treeline_runtime.models.settings import words
from treeline_runtime.server.errors import invalid, short, wrong
from treeline_runtime.server.fields import Body
from treeline_runtime.server.grammars import Constraint
from treeline_runtime.stop_regex import automaton

if TYPE_CHECKING:
    from treeline_runtime.server.prompts import Prompts


ProcessorName = Annotated[
    str,
    Meta(
        description="A logit processor that the server was started with.",
        extra_json_schema={"maxLength": MAX_NAME_CHARS},
    ),
]
MAX_PARAMS_BYTES: Final = 64 << 10
"""Bytes of the parameters as JSON."""
MAX_DEPTH: Final = 32


def read_processor(
    names: Mapping[str, str | None], given: Mapping[str, dict[str, Any] | None]
) -> CustomProcessor | None:
    """names, given: the fields with the name, and the parameters. Raises ApiError 400."""
    named = {field: name for field, name in names.items() if name is not None}
    filled = {field: params for field, params in given.items() if params}
    for found in (named, filled):
        if len(found) > 1:
            first, second, *_ = found
            raise invalid(second, f"it means the same as {first!r}: give one")
    if not named:
        for field in filled:
            raise invalid(field, "which logit processor is it for? Name it as 'custom_logit_processor'")
        return None
    ((field, name),) = named.items()
    if name.lstrip().startswith("{"):
        raise invalid(
            field,
            "requests cannot contain code. Put the class where the server can import it, start the server with "
            "--logit-processor NAME=module:attribute, and send NAME",
        )
    if not is_name(name):
        raise invalid(field, f"a name has 1 to {MAX_NAME_CHARS} of A-Z, a-z, 0-9, _, . and -")
    for param, params in filled.items():
        return _made(name, params, param)
    return CustomProcessor(name)


def _made(name: str, params: dict[str, Any], param: str) -> CustomProcessor:
    if _is_deep(params):
        raise invalid(param, f"nested more than {MAX_DEPTH} levels deep")
    try:
        made = CustomProcessor.of(name, params)
    except UnicodeEncodeError:
        raise invalid(param, "it contains half of a surrogate pair") from None
    if len(made.params) > MAX_PARAMS_BYTES:
        raise invalid(param, f"larger than {MAX_PARAMS_BYTES} bytes")
    return made


def _is_deep(params: dict[str, Any]) -> bool:
    level: list[Any] = [params]
    for _ in range(MAX_DEPTH):
        inner = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_STOP_REGEX = 4
MAX_ID_DIGITS = 10

Temperature = Annotated[float, Meta(ge=0.0, le=1e6)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=10.0)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
PositiveCount = Annotated[int, Meta(ge=1, le=1 << 31)]
TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Priority = Annotated[int, Meta(ge=-LARGEST_PRIORITY, le=LARGEST_PRIORITY)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values for unset fields: OpenAI's defaults, or the checkpoint's (`generation_config.json`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_model(cls, model_dir: Path) -> SamplingDefaults:
        """Reads the checkpoint's file, if there is one. Raises ValueError for unsupported settings."""
        try:
            config = parse_generation_config((model_dir / "generation_config.json").read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"generation_config.json: {error}; correct it, or leave it out with --sampling-defaults openai"
            ) from None
        given = {name: value for name in cls.__struct_fields__ if (value := getattr(config, name)) is not None}
        if given.get("top_k") == 0:
            given["top_k"] = -1
        if config.do_sample is False:
            given["temperature"] = 0.0
        return cls(**given)


class SamplingFields(Body, frozen=True):
    """Sampling fields of all APIs. None = unset."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    stop_regex: str | Annotated[list[str], Meta(max_length=MAX_STOP_REGEX)] | None = None
    """SGLang's."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGIT_BIAS)] | None = None
    """vLLM's, as the next."""
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    """vLLM's name of `no_stop_trim`."""
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Bias] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None

    def params(
        self,
        defaults: SamplingDefaults,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        min_new_tokens: int | None,
        seed: int | None,
        min_param: str = "min_tokens",
        where: str = "",
        constraint: Constraint | None = None,
        processor: CustomProcessor | None = None,
    ) -> SamplingParams:
        """Raises ApiError 400 for values that only the whole request or the model can refuse.

        `min_param`: the API's name of `min_new_tokens`; `where`: prefix of the other names.

        An output with a grammar ends where the grammar ends, even with `ignore_eos`.
        """
        if min_new_tokens and constraint is not None:
            raise wrong(
                min_param,
                f"{min_param!r} and {constraint.param!r} contradict each other: a grammar decides where it ends",
            )
        if min_new_tokens and min_new_tokens > max_new_tokens:
            raise wrong(
                min_param, f"{min_param!r} is {min_new_tokens}, but at most {max_new_tokens} tokens are produced"
            )
        top_k, vocab_size = _or(self.top_k, defaults.top_k), prompts.vocab_size
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens or 0,
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=top_k or -1,
            min_p=_or(self.min_p, defaults.min_p),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            stop=_stop_strings(self.stop, where),
            stop_token_ids=_token_ids(self.stop_token_ids, vocab_size, where + "stop_token_ids"),
            stop_regex=_patterns(self.stop_regex, where + "stop_regex"),
            allowed_token_ids=_token_ids(self.allowed_token_ids, vocab_size, where + "allowed_token_ids"),
            bad_words=_bad_words(self.bad_words, prompts, where + "bad_words"),
            ignore_eos=bool(self.ignore_eos) and constraint is None,
            no_stop_trim=bool(self.no_stop_trim or self.include_stop_str_in_output),
            skip_special_tokens=_or(self.skip_special_tokens, True),
            logit_bias=_logit_bias(self.logit_bias, vocab_size, where),
            seed=None if seed is None else seed & ((1 << 63) - 1),
            grammar=None if constraint is None else constraint.grammar,
            grammar_param=None if constraint is None else constraint.param,
            logit_processor=processor,
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _stop_strings(stop: str | list[str] | None, where: str) -> tuple[str, ...]:
    if not stop:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    param = where + "stop"
    if len(strings) > MAX_STOP_STRINGS:
        raise wrong(param, f"{param!r} has more than {MAX_STOP_STRINGS} strings")
    for string in strings:
        if not 0 < len(string) <= MAX_STOP_CHARS:
            raise wrong(param, f"{param!r}: each string has 1 to {MAX_STOP_CHARS} characters")
    return tuple(strings)


def _patterns(given: str | list[str] | None, param: str) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given or ())
    for pattern in patterns:
        try:
            if len(pattern) > MAX_STOP_CHARS:
                raise GrammarError(f"has more than {MAX_STOP_CHARS} characters")
            automaton(pattern)
        except GrammarError as error:
            raise invalid(param, short(error)) from None
    return patterns


def _bad_words(words: list[str] | None, prompts: Prompts, param: str) -> tuple[tuple[int, ...], ...]:
    """Tokenizes bad words as vLLM does: each as it is, and after a space if that changes only its first token."""
    found = dict[tuple[int, ...], None]()
    for word in words or ():
        plain, spaced = (tuple(prompts.ids_of(space + word.lstrip())) for space in ("", " "))
        if not plain:
            raise invalid(param, "each word has a token at least")
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
    return tuple(found)


def _token_ids(ids: list[int] | None, vocab_size: int, param: str) -> tuple[int, ...]:
    for id in ids or ():
        if id >= vocab_size:
            raise wrong(param, f"{param!r}: token id {id} is not below {vocab_size}, the vocabulary's size")
    return tuple(dict.fromkeys(ids or ()))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int, where: str) -> dict[int, float] | None:
    if not bias:
        return None
    param = where + "logit_bias"
    if len(bias) > MAX_LOGIT_BIAS:
        raise wrong(param, f"{param!r} has more than {MAX_LOGIT_BIAS} entries")
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
            raise wrong(param, f"{param!r}: {key[:40]!r} is not a token id")
        by_id[int(key)] = value
    _token_ids(list(by_id), vocab_size, param)
    return by_id


NO_EFFECT = words(
    # token ids: eos_token_id is read with the model, the others are never added
    "bos_token_id decoder_start_token_id eos_token_id pad_token_id "
    # lengths and numbers of answers, which every API has its own defaults for
    "max_length max_new_tokens num_return_sequences "
    # of beam search, which num_beams would turn on
    "diversity_penalty early_stopping length_penalty low_memory num_beam_groups "
    # how it is computed, and what else is returned
    "assistant_confidence_threshold assistant_early_exit assistant_lookbehind cache_config cache_implementation "
    "compile_config disable_compile is_assistant max_matching_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule output_attentions output_hidden_states output_logits output_scores "
    "prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values return_dict_in_generate target_lookbehind "
    "use_cache "
    # where it comes from
    "_from_model_config _name_or_path chat_format max_window_size transformers_version trust_remote_code"
)

NOT_USED: dict[str, tuple[object, ...]] = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "renormalize_logits": (False,),
    "token_healing": (False,),
    "typical_p": (1,),
}
"""Key → values that mean "not used"; `null` does for every key."""


class GenerationConfig(msgspec.Struct, frozen=True):
    """The supported part. None = unset."""

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None


def parse_generation_config(data: bytes) -> GenerationConfig:
    """Raises ValueError, with the key in its message."""
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
        config = msgspec.convert(raw, GenerationConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    known = NO_EFFECT | set(GenerationConfig.__struct_fields__)
    unknown = [
        f"{key} = {value!r}"
        for key, value in raw.items()
        if value is not None and key not in known and value not in NOT_USED.get(key, ())
    ]
    if unknown:
        raise ValueError(f"settings that are not supported: {', '.join(unknown)}")
    return config
