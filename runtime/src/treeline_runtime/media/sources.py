"""Images in bodies, not read yet: a pure function of the body, for any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from treeline_wire.dialects.media_parts import MediaPart, bytes_of
from treeline_wire.errors import PromptError
from treeline_wire.media import Kind, MediaSpec, item_digest

from treeline_runtime.messages import GenerateReq
from treeline_runtime.server.errors import invalid, unsupported, wrong
from treeline_runtime.server.fields import MEDIA_SETTINGS, is_neutral

if TYPE_CHECKING:
    from treeline_runtime.server.native_fields import GenerateBody


class MediaRules(msgspec.Struct, frozen=True):
    """What requests to a model that reads images may have."""

    spec: MediaSpec
    most: int
    """Items of a request."""
    off: dict[str, str] = {}
    """Why items of a kind cannot be read here, though the model could."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of items that can be read here."""
        return [kind for kind in self.spec.placeholders if kind not in self.off]


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image of a request. `param`: its place in the body."""

    kind: Kind
    param: str
    url: str = ""
    """Where to fetch it; "": here it is."""
    data: bytes = b""
    digest: bytes = b""
    """Its identity, of `data`."""


class PromptMedia(msgspec.Struct, frozen=True, omit_defaults=True):
    """The images of a prompt, whose ids have a placeholder for each."""

    sources: tuple[Source, ...]
    max_new_tokens: int | None = None
    """As asked for: the images' tokens leave less room. None: as many as there is room for."""


def read_sources(
    body: Mapping[str, Any], media: Sequence[Sequence[MediaPart]], rules: MediaRules | None, *, bare: bool = False
) -> list[tuple[Source, ...]]:
    """The images of each prompt of a body. `bare`: base64 may come without `data:`. Raises ApiError 400."""
    every = [part for parts in media for part in parts]
    if not every:
        return [() for _ in media]
    if rules is None:
        raise unsupported(every[0].param, "this model reads texts only")
    if (other := next((part for part in every if part.kind not in rules.kinds), None)) is not None:
        kinds = " and ".join(map(repr, rules.kinds))
        raise unsupported(other.param, rules.off.get(other.kind, f"this model reads texts and items of kind {kinds}"))
    if len(every) > rules.most:
        raise wrong(every[0].param, f"The request has {len(every)} items, more than {rules.most} (--max-images)")
    for name in MEDIA_SETTINGS:
        if not is_neutral(name, body.get(name)):
            raise unsupported(name, "images are read as the model's processor is configured")
    return [tuple(_source(part, rules.spec, bare) for part in parts) for parts in media]


def _source(part: MediaPart, spec: MediaSpec, bare: bool) -> Source:
    try:
        data = bytes_of(part.url, part.param, bare=bare)
    except PromptError as error:
        raise invalid(error.param, str(error), code=None) from None
    if data is None:
        return Source(part.kind, part.param, part.url)
    if not data:
        raise invalid(part.param, "it is empty")
    return Source(part.kind, part.param, "", data, item_digest(part.kind, data, spec.fingerprint))


def parts_of_native(body: GenerateBody, prompts: int, batched: bool) -> list[tuple[MediaPart, ...]]:
    """The parts of `image_data` and `video_data` for each prompt. Raises ApiError 400."""
    images = _of_each("image", body.image_data, prompts, batched)
    videos = _of_each("video", body.video_data, prompts, batched)
    return [(*both[0], *both[1]) for both in zip(images, videos, strict=True)]


def _of_each(kind: Kind, value: Any, prompts: int, batched: bool) -> list[tuple[MediaPart, ...]]:
    name = f"{kind}_data"
    if value is None:
        return [()] * prompts
    if not batched:
        return [_parts(kind, value, name)]
    if not isinstance(value, list) or len(value) != prompts:
        raise invalid(name, f"expected a list with the {kind}s of each of the {prompts} prompts")
    return [_parts(kind, one, f"{name}[{i}]") for i, one in enumerate(value)]


def _parts(kind: Kind, value: Any, where: str) -> tuple[MediaPart, ...]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, str) for one in listed):
        raise invalid(where, f"expected URLs or base64 of {kind}s; what a processor made is not taken")
    return tuple(MediaPart(kind, where, one) for one in listed)


def checked(media: Sequence[PromptMedia], requests: Sequence[GenerateReq]) -> list[PromptMedia]:
    """The images of each request, [] without any. Raises ApiError 400 for what is unknown of a prompt with images."""
    if not any(one.sources for one in media):
        return []
    for one, request in zip(media, requests, strict=True):
        if one.sources and request.logprob_start_len >= 0:
            raise unsupported(
                one.sources[0].param, "log probabilities of a prompt with images are unknown: ask for the output's"
            )
    return [*media]


def named(media: PromptMedia, param: str) -> PromptMedia:
    """The same, for a request whose member `param` has become the chat's messages."""
    return replace(media, sources=tuple(replace(source, param=param) for source in media.sources))
