"""Reads the config.json of an EAGLE-3 head, in its two public forms. No torch here.

The original form (yuhuili, SpecForge) has a Llama layer's keys and some of its own beside them; the form of
`speculators` has the layer's in `transformer_layer_config`. They count layers of the target differently, and have other
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeline_runtime.models.config import parse_config
from treeline_runtime.models.model_config import PLAIN, ModelConfig
from treeline_runtime.models.settings import ModelError, flag, read_object, words

_OWN = words(
    "aux_norm draft_vocab_size eagle_aux_hidden_state_layer_ids eagle_config fc_norm norm_before_fc "
    "norm_before_residual norm_output num_aux_hidden_states target_hidden_size use_aux_norm"
)
_SPECULATORS = words(
    "algorithm architectures embed_requires_grad model_type speculators_config speculators_model_type "
    "speculators_version target_model_type transformer_layer_config transformers_version"
)
"""What the form of `speculators` has besides: names, versions and training."""
_EAGLE_CONFIG = words("eagle_aux_hidden_state_layer_ids norm_before_fc use_aux_hidden_state")


@dataclass(frozen=True)
class EagleConfig:
    """A head of one layer."""

    layer: ModelConfig
    """Its layer as a Llama model; the vocabulary is the target's."""
    features: tuple[int, ...]
    """It reads the residual stream that enters these layers of the target."""
    target_hidden_size: int
    draft_vocab_size: int | None
    """Tokens that it can guess; None: all of the target's, with the target's own head."""
    norm_before_residual: bool
    """Its residual stream begins with the normed hidden state, not with the hidden state."""
    norm_before_fc: bool
    """A norm over all features together before they are joined."""
    fc_norm: bool
    """A norm over each of them."""
    norm_output: bool
    """The next guess gets the normed hidden state, not the residual stream."""


def read_eagle(path: str | Path, target: ModelConfig) -> EagleConfig:
    """The head in a folder, for this target. Raises ModelError, also for whatever would change its guesses and is not
    known here."""
    where = Path(path) / "config.json"
    try:
        return _parse(read_object(where), target)
    except (ModelError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"EAGLE-3 head {path}: {error}") from None


def _parse(config: Mapping[str, Any], target: ModelConfig) -> EagleConfig:
    is_new = "speculators_model_type" in config
    if is_new:
        if (kind := config["speculators_model_type"]) != "eagle3":
            raise ModelError(f"speculators_model_type is {kind!r}; only eagle3 is supported")
        inner = {key: value for key, value in config.items() if key not in _OWN | _SPECULATORS}
        inner |= config["transformer_layer_config"]
    else:
        kinds = [str(kind) for kind in config.get("architectures") or []]
        if not any("Eagle" in kind and kind.startswith("Llama") for kind in kinds):
            raise ModelError(f"architecture {', '.join(kinds)} is no head of Llama's form (LlamaForCausalLMEagle3)")
        inner = {key: value for key, value in config.items() if key not in _OWN}
    if not isinstance(nested := config.get("eagle_config") or {}, dict):
        raise ModelError("eagle_config is not a JSON object")
    if unknown := set(nested) - _EAGLE_CONFIG:
        raise ModelError(f"settings of eagle_config that are not known here: {', '.join(sorted(unknown))}")
    if nested.get("use_aux_hidden_state") is False:
        raise ModelError("use_aux_hidden_state is false; only heads that read three layers are supported")
    layer = _layer(inner, target)
    hidden = int(config.get("target_hidden_size") or layer.hidden_size)
    if hidden != target.hidden_size:
        raise ModelError(f"it is for a model with hidden states of {hidden}, not {target.hidden_size}")
    vocab = config.get("draft_vocab_size")
    return EagleConfig(
        layer=layer,
        features=_features(config, nested, target.num_layers, is_new=is_new),
        target_hidden_size=hidden,
        draft_vocab_size=None if vocab is None else int(vocab),
        norm_before_residual=flag({"norm_before_residual": is_new} | dict(config), "norm_before_residual"),
        norm_before_fc=flag(config, "norm_before_fc") or flag(nested, "norm_before_fc"),
        fc_norm=any(flag(config, key) for key in ("fc_norm", "use_aux_norm", "aux_norm")),
        norm_output=flag(config, "norm_output"),
    )


def _layer(inner: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    kind = inner.get("model_type", "llama")
    if kind != "llama":
        raise ModelError(f"its layer is of model_type {kind!r}; only llama is supported")
    config = {**inner, "architectures": ["LlamaForCausalLM"], "model_type": kind}
    layer = parse_config({"max_position_embeddings": target.max_position, **config}, {})
    if layer.num_layers != 1:
        raise ModelError(f"it has {layer.num_layers} layers; only one is supported")
    if layer.quantization is not None or layer.scoring != PLAIN:
        raise ModelError("quantised heads and windows are not supported")
    if layer.vocab_size != target.vocab_size:
        raise ModelError(f"its vocabulary has {layer.vocab_size} tokens, the model's {target.vocab_size}")
    return replace(layer, tie_word_embeddings=False)


def _features(config: Mapping[str, Any], nested: Mapping[str, Any], layers: int, *, is_new: bool) -> tuple[int, ...]:
    """The layers whose input it reads. The original form names layers whose output it is."""
    key = "eagle_aux_hidden_state_layer_ids"
    given = config.get(key) or nested.get(key)
    found = (2, layers // 2, layers - 3) if given is None else tuple(int(i) + (not is_new) for i in given)
    if not all(0 <= i < layers for i in found):
        raise ModelError(f"it reads what enters the layers {', '.join(map(str, found))} of {layers}")
    return found
