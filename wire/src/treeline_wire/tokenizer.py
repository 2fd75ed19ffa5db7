"""A tokenizer and its chat template as one value, served by runtimes and fetched by pickers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from .media import MediaSpec

_SPECIAL_SUFFIX: Final = "_token"
_PIECE_CHARS: Final = 1 << 18
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_GEMMA3: Final = {
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "mm_tokens_per_image": 256,
}
"""What Gemma 3's config.json need not say."""
FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "config.json",
    *_PROCESSOR_FILES,
)
"""The files that `TokenizerBundle.from_dir` reads, besides `MORE_TEMPLATES`; only the first must exist."""
MORE_TEMPLATES: Final = "additional_chat_templates"
MAX_BUNDLE_BYTES: Final = 256 << 20
"""More than any known tokenizer.json (about 35 MB), in bytes."""


class BundleError(ValueError):
    """A directory or document without a usable tokenizer."""


class _AddedToken(Struct):
    id: int
    content: str


class _Document(Struct):
    added_tokens: list[_AddedToken] = []


class TokenizerBundle(Struct, frozen=True, kw_only=True):
    """The data with which both sides turn a request into a prompt.

    `tokenizer_json`: the `tokenizers` library's file. `special_tokens`: names in chat templates (`bos_token`,
    `eos_token`, …) → contents. `add_bos`: the configuration's `add_bos_token`, None if absent; for information, since
    the post-processor decides. `tool_template`: the separate template `tool_use`. `media`: of models that take images.
    `fingerprint`: identifies all of it; equal fingerprints give equal prompts.
    """

    fingerprint: str
    tokenizer_json: str
    chat_template: str | None = None
    tool_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    special_tokens: dict[str, str] = {}
    add_bos: bool | None = None
    media: MediaSpec | None = None

    @classmethod
    def build(
        cls,
        tokenizer_json: str,
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        add_bos: bool | None = None,
        media: MediaSpec | None = None,
    ) -> TokenizerBundle:
        """Makes a bundle from its parts and computes the fingerprint."""
        tokens = dict(sorted((special_tokens or {}).items()))
        rest: list[Any] = [chat_template, tool_template, tokens, add_bos]
        if media is not None:  # bundles without it keep their fingerprints
            rest.append([sorted(media.placeholders.items()), media.fingerprint])
            if media.written or media.counts:
                rest.append([sorted(media.written.items()), sorted(media.counts.items())])
        return cls(
            fingerprint=_fingerprint(tokenizer_json, rest),
            tokenizer_json=tokenizer_json,
            chat_template=chat_template,
            tool_template=tool_template,
            bos_token=tokens.get("bos_token"),
            eos_token=tokens.get("eos_token"),
            special_tokens=tokens,
            add_bos=add_bos,
            media=media,
        )

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> TokenizerBundle:
        """Reads a model directory in Hugging Face's layout. Raises `BundleError`."""
        folder = Path(path)
        tokenizer_json = _text(folder / "tokenizer.json")
        if tokenizer_json is None:
            raise BundleError(f"{folder} has no tokenizer.json (only fast tokenizers are supported)")
        config = _object(folder / "tokenizer_config.json")
        tokens = _special_tokens(_object(folder / "special_tokens_map.json")) | _special_tokens(config)
        templates = _templates(folder, config)
        add_bos = config.get("add_bos_token")
        return cls.build(
            tokenizer_json,
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            special_tokens=tokens,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            media=_media(folder, tokenizer_json, tokens),
        )

    def to_json(self) -> bytes:
        """Returns the document that a runtime serves."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, document: bytes) -> TokenizerBundle:
        """Reads `to_json`'s document; unknown members are ignored. Raises `BundleError`.

        The fingerprint must match the parts: pools share data by fingerprint, so no engine may choose it.
        """
        if len(document) > MAX_BUNDLE_BYTES:
            raise BundleError(f"a tokenizer of {len(document)} bytes is too large")
        try:
            given = msgspec.json.decode(document, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BundleError(f"not a tokenizer bundle: {str(error)[:200]}") from None
        made = cls.build(
            given.tokenizer_json,
            chat_template=given.chat_template,
            tool_template=given.tool_template,
            special_tokens=given.special_tokens,
            add_bos=given.add_bos,
            media=given.media,
        )
        if made != given:
            raise BundleError(f"the fingerprint {given.fingerprint[:64]!r} is not that of its parts")
        return made


def _fingerprint(tokenizer_json: str, rest: list[Any]) -> str:
    """Returns the digest of the JSON list of all parts. The first part is written in pieces: one call on a large one
    would block all threads for half a second.
    """
    made = hashlib.sha256(b'["')
    for at in range(0, len(tokenizer_json), _PIECE_CHARS):
        made.update(json.dumps(tokenizer_json[at : at + _PIECE_CHARS])[1:-1].encode())
    made.update(b'", ')
    made.update(json.dumps(rest)[1:].encode())
    return made.hexdigest()[:32]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read {path}: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    text = _text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path} is not a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns named tokens: members `*_token`, as text or as an object with `content`, and model-specific ones."""
    tokens: dict[str, str] = {}
    for extra in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(extra), dict):
            config = {**config[extra], **config}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith(_SPECIAL_SUFFIX) and isinstance(content, str):
            tokens[name] = content
    return tokens


def _media(folder: Path, tokenizer_json: str, tokens: dict[str, str]) -> MediaSpec | None:
    """Returns what the folder of a model that takes images says about them; None without placeholders or processor."""
    config = _object(folder / "config.json")
    is_gemma = config.get("model_type") == "gemma3"
    if is_gemma:
        config = _GEMMA3 | config
        config.setdefault("image_token_id", config["image_token_index"])
    kinds = {config.get(f"{kind}_token_id"): kind for kind in ("image", "video", "audio")}
    files = {name: found for name in _PROCESSOR_FILES if (found := _object(folder / name))}
    if not files or not any(type(token) is int for token in kinds):
        return None
    try:
        added = msgspec.json.decode(tokenizer_json, type=_Document).added_tokens
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BundleError(f"{folder / FILES[0]} is not a tokenizer: {error}") from error
    placeholders = {kinds[token.id]: token.content for token in added if token.id in kinds}
    image, written, counts = placeholders.get("image"), dict[str, tuple[str, str]](), dict[str, int]()
    if is_gemma and image is not None:
        names = {token.id: token.content for token in added}
        first, last = (names.get(config[f"{name}_token_index"], image) for name in ("boi", "eoi"))
        written["image"] = first, f"\n\n{first}{image}{last}\n\n"
        counts["image"] = config["mm_tokens_per_image"]
    elif config.get("model_type") == "internvl" and image is not None:
        first, last = (tokens.get(f"{name}_image_token", "") for name in ("start", "end"))
        written["image"] = image, f"{first}{image}{last}"
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:32]
    return MediaSpec(placeholders, digest, written, counts) if placeholders else None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns templates by name. Separate files win over the configuration, as in `transformers`."""
    found: dict[str, str] = {}
    value = config.get("chat_template") or _object(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and isinstance(item.get("template"), str):
                found[str(item.get("name"))] = item["template"]
    main = _text(folder / "chat_template.jinja")
    if main is not None:
        found["default"] = main
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        found[path.stem] = _text(path) or ""
    return found
