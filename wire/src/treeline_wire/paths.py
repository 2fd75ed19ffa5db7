"""Inference paths of each engine, which may be reached through a gateway.

All other paths (cache flushing, aborting, metrics, weights, profiling, adapters) are administration. These are
allow-lists: new paths of an engine stay closed until they are added. The edge's routes, a pool's HTTPRoute and the
picker read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

READ: Final = ("GET", "HEAD", "OPTIONS")
WRITE: Final = ("POST", "OPTIONS")


@dataclass(frozen=True, slots=True)
class PathRule:
    """A served path, compared exactly and case-sensitively, and its methods.

    `below`: all paths below it, as far as `BELOW` allows, instead of the path itself.
    """

    path: str
    methods: tuple[str, ...]
    below: bool = False


BELOW: Final = r"/(?:[A-Za-z0-9._~:@+=,/-]|%(?:20|2[BbCc]|3[AaDd]|40))+"
"""The pattern of paths after one with `below`: model names. No escaped slash, dot or percent sign, and no `;`, which
edge and engine could read differently. Valid in RE2 and `re`."""

_MODELS: Final = (
    PathRule("/v1/models", READ),
    PathRule("/v1/models", READ, below=True),
    # For clients and load balancers. It only shows whether the engine serves.
    PathRule("/health", READ),
)
_OPENAI: Final = ("/v1/chat/completions", "/v1/completions")
_TOKENS: Final = ("/tokenize", "/detokenize")
_GETS: Final[Mapping[str, tuple[str, ...]]] = {"treeline": ("/api/tags", "/api/ps", "/api/version")}
_POSTS: Final[Mapping[str, tuple[str, ...]]] = {
    "treeline": (
        *_OPENAI,
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/generate",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/v1/audio/transcriptions",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/v1/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        *_TOKENS,
        "/v1/tokenize",
        "/v1/detokenize",
    ),
    "vllm": (
        *_OPENAI,
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v2/embed",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        *_TOKENS,
    ),
    "sglang": (
        *_OPENAI,
        "/generate",
        "/encode",
        "/classify",
        "/v1/classify",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v1/audio/transcriptions",
        *_TOKENS,
        "/v1/tokenize",
        "/v1/detokenize",
    ),
    "custom": (
        *_OPENAI,
        "/v1/responses",
        "/v1/embeddings",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/generations",
        "/v1/moderations",
        "/v1/score",
        "/v1/rerank",
    ),
}

INFERENCE: Final[Mapping[str, tuple[PathRule, ...]]] = {
    engine: (
        *(PathRule(path, WRITE) for path in posts),
        *(PathRule(path, READ) for path in _GETS.get(engine, ())),
        *_MODELS,
    )
    for engine, posts in _POSTS.items()
}
"""Engine type (`spec.engine.type`) → its inference paths."""

_EXACT: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    engine: {rule.path: rule.methods for rule in rules if not rule.below} for engine, rules in INFERENCE.items()
}
_BELOW: Final[Mapping[str, tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]]] = {
    engine: tuple((re.compile(re.escape(rule.path) + BELOW), rule.methods) for rule in rules if rule.below)
    for engine, rules in INFERENCE.items()
}


def inference_paths(engines: Iterable[str]) -> tuple[PathRule, ...]:
    """Returns the union of these engines' paths, in a fixed order. Raises `KeyError` for an unknown engine."""
    return tuple(dict.fromkeys(rule for engine in sorted(set(engines)) for rule in INFERENCE[engine]))


def is_inference(engine: str, method: str, path: str) -> bool:
    """Whether clients may use this path of an engine. `path` is without the query and compared as it is; a path that is
    not in normal form is refused. Raises `KeyError` as above."""
    methods = _EXACT[engine].get(path)
    if methods is not None:
        return method in methods
    if "//" in path or "/." in path:
        return False
    return any(method in methods and pattern.fullmatch(path) for pattern, methods in _BELOW[engine])
