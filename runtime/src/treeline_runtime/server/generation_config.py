"""The checkpoint's generation_config.json: what unset sampling values mean, as its author wanted them.

It is read as config.json is: what is known and acted on, what has no effect here, and what would change the answers but
is not supported, which is refused by name (`--sampling-defaults openai` leaves the whole file out).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_EFFECT = _words(
    # token ids: eos_token_id is read with the model, nobody adds the others
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
"""Key → its values that mean "not used"; `null` does for every key."""


class GenerationConfig(msgspec.Struct, frozen=True):
    """The part that is acted on. None = unset."""

    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None


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
