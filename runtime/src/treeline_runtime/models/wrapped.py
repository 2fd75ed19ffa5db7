"""Models of texts and images of which the language model is served alone: their config.json has that model's within."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeline_runtime.models.settings import ModelError

TEXT = "text_config"


@dataclass(frozen=True)
class Wrapper:
    model_type: str
    language_model: str
    """Its architecture, as it would be named if it had been saved by itself."""
    about_images: frozenset[str]
    """Keys beside `text_config` that say nothing of the language model."""


WRAPPERS = {
    "Llama4ForConditionalGeneration": Wrapper(
        "llama4",
        "Llama4ForCausalLM",
        frozenset({"boi_token_index", "eoi_token_index", "image_token_index", "vision_config"}),
    )
}


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json of the language model as if it had been saved by itself; that of any other model as it is.

    Raises ModelError.
    """
    names = config.get("architectures")
    name = next((name for name in map(str, names) if name in WRAPPERS), None) if isinstance(names, list) else None
    if name is None:
        return config
    wrapper, text = WRAPPERS[name], config.get(TEXT)
    if not isinstance(text, dict):
        raise ModelError(f"config.json: a {name} has a {TEXT}, which is an object")
    if (kind := config.get("model_type")) not in (None, wrapper.model_type):
        raise ModelError(f"config.json has architecture {name}, but model_type {kind!r}: which is it?")
    around = {key: value for key, value in config.items() if key not in wrapper.about_images | {TEXT, "model_type"}}
    # null within may mean something of its own (no chunks, say), but what is said around is not taken back by it
    within = {key: value for key, value in text.items() if value is not None or around.get(key) is None}
    key = "quantization_config"
    if around.get(key) is not None and key in within and around[key] != within[key]:
        raise ModelError(f"config.json has {key}, and another in its {TEXT}: which is it?")
    return around | within | {"architectures": [wrapper.language_model]}
