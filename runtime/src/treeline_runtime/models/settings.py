"""Reads a checkpoint's files and config.json's values with errors that name file or key, and lists the known keys. An
unknown key may change what the model computes, and is refused.

A key is read by `ModelConfig` or the family (`families/`), or has no effect, or only values that mean "not used", as
`null` does for every key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SLIDING = "sliding_attention"
FULL = "full_attention"


class ModelError(Exception):
    """The checkpoint cannot be served; the message says which file or setting, and what would do."""


def read_json(path: Path) -> Any:
    """The content of a checkpoint's file. Raises ModelError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model directory has the Hugging Face layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object")
    return data


def flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return bool(value)


def positive(config: Mapping[str, Any], key: str) -> float | None:
    """A number above 0; None if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return None
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{key} must be above 0, not {value!r}")
    return float(value)


def needed(config: Mapping[str, Any], key: str) -> float:
    if (value := positive(config, key)) is None:
        raise KeyError(key)
    return value


def whole(config: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 1. Raises ModelError, or KeyError if the key is missing."""
    value = config[key]
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {key} must be a whole number of at least 1, not {value!r}")
    return value


def layer_types(config: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Each layer's type: `layer_types`, or the default."""
    given = config.get("layer_types")
    kinds = list(default) if given is None else [str(kind) for kind in given]
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ModelError(f"layers of type {', '.join(unknown)} are not supported (layer_types)")
    if len(kinds) != len(default):
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {len(default)} layers")
    return kinds


def windows(kinds: Sequence[str], size: object) -> tuple[int | None, ...]:
    """For `Scoring.windows`: `size` tokens (`sliding_window`) where a layer is SLIDING; () if none is."""
    if SLIDING not in kinds:
        return ()
    if size is None:
        raise ModelError(f"config.json has layers of type {SLIDING}, but no sliding_window")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ModelError(f"config.json: sliding_window must be a whole number of at least 1, not {size!r}")
    size = min(size, 1 << 30)  # kernels count in 32 bits; no context is as long
    return tuple(size if kind == SLIDING else None for kind in kinds)


# ---- known keys -----------------------------------------------------------------------------------------------


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READ = words(
    "architectures eos_token_id head_dim hidden_size intermediate_size max_position_embeddings model_type "
    "num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor "
    "quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size "
    # how vectors are made of hidden states (`pooling`)
    "is_matryoshka matryoshka_dimensions sbert_ce_default_activation_function sentence_transformers"
)
"""Keys that are read for every family."""

NO_EFFECT = words(
    # origin and author
    "_commit_hash _name_or_path auto_map finetuning_task is_llama_config max_sequence_length model_max_length "
    "name_or_path task_specific_params tokenizer_class transformers.js_config transformers_version unsloth_fixed "
    "unsloth_version "
    # how other programs compute the same
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _experts_implementation "
    "attn_implementation cache_implementation dtype pretraining_tp torch_dtype torchscript use_bfloat16 use_cache "
    "use_flash_attn "
    # training alone
    "attention_dropout attention_probs_dropout_prob attn_pdrop embd_pdrop gradient_checkpointing hidden_dropout "
    "hidden_dropout_prob initializer_range residual_dropout resid_pdrop router_aux_loss_coef router_jitter_noise "
    "tf_legacy_loss "
    # other tasks, other outputs; max_window_layers belongs to use_sliding_window
    "chunk_size_feed_forward id2label is_decoder label2id max_window_layers num_labels output_attentions "
    "output_hidden_states output_router_logits problem_type return_dict "
    # token ids that are never added here
    "bos_token_id decoder_start_token_id pad_token_id prefix sep_token_id unk_token_id "
    # generation settings in their old place: transformers reads them from generation_config.json alone
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length "
    "max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores "
    "remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p "
    "typical_p"
)

NOT_USED: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "bias": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "pruned_heads": ({},),
    "qkv_bias": (False,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Key → values that mean "not used"; other values change what is computed."""

ROPE = words(
    "attention_factor beta_fast beta_slow factor finetuned high_freq_factor long_factor low_freq_factor mscale "
    "mscale_all_dim original_max_position_embeddings partial_rotary_factor rope_theta rope_type short_factor truncate "
    "type"
)
"""Keys of rope_parameters and rope_scaling; `finetuned` only describes training."""


def unknown_settings(
    config: Mapping[str, Any], read: frozenset[str], not_used: Mapping[str, tuple[object, ...]]
) -> list[str]:
    """Unknown settings of config.json as `key = value`. read, not_used: the family's own."""
    known = READ | NO_EFFECT | read
    unused = {**NOT_USED, **not_used}
    return [
        f"{key} = {value!r}"
        for key, value in config.items()
        if value is not None and key not in known and value not in unused.get(key, ())
    ]


def unknown_rope_settings(values: Mapping[str, Any]) -> list[str]:
    """The same for rope settings."""
    return [f"{key} = {value!r}" for key, value in values.items() if value is not None and key not in ROPE]
