"""Which keys of config.json are known. An unknown key may change what the model computes: it is refused.

A key is read by `ModelConfig` or by the family (`families/`), or has no effect on the answers, or has values that mean
"not used". `null` is such a value for every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READ = words(
    "architectures eos_token_id head_dim hidden_size intermediate_size max_position_embeddings model_type "
    "num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor "
    "quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size "
    # how vectors are made of hidden states (`pooling`)
    "is_matryoshka matryoshka_dimensions sbert_ce_default_activation_function sentence_transformers"
)
"""For every family."""

NO_EFFECT = words(
    # where it comes from, and who wrote it
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
"""Key → its values that mean "not used"; with any other it changes what is computed."""

ROPE = words(
    "attention_factor beta_fast beta_slow factor finetuned high_freq_factor long_factor low_freq_factor mscale "
    "mscale_all_dim original_max_position_embeddings partial_rotary_factor rope_theta rope_type short_factor truncate "
    "type"
)
"""Keys of rope_parameters and rope_scaling; `finetuned` is a remark about training."""


def unknown_settings(
    config: Mapping[str, Any], read: frozenset[str], not_used: Mapping[str, tuple[object, ...]]
) -> list[str]:
    """What config.json asks for that is not known here, as `key = value`. read, not_used: the family's own."""
    known = READ | NO_EFFECT | read
    unused = {**NOT_USED, **not_used}
    return [
        f"{key} = {value!r}"
        for key, value in config.items()
        if value is not None and key not in known and value not in unused.get(key, ())
    ]


def unknown_rope_settings(values: Mapping[str, Any]) -> list[str]:
    """The same for the rope settings within it."""
    return [f"{key} = {value!r}" for key, value in values.items() if value is not None and key not in ROPE]
