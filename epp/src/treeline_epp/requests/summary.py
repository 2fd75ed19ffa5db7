"""What is read of a large request body: its short members, and the beginning of its prompt."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from treeline_wire.json_values import count_values

from treeline_epp.requests.body import Body
from treeline_epp.requests.outline import NotReadable, Outline, beginning, is_ids

MAX_VALUES: Final = 4096
"""Values (of objects and lists) that are read of one body: reading and rendering cost by the value."""
PROMPT_BYTES: Final = 192 * 1024
"""Bytes that are read of a prompt, of any other member, and of all others together."""
_MEMBER_BYTES: Final = 128 * 1024
_MEMBERS_BYTES: Final = 192 * 1024
_IDS_BYTES: Final = 64 * 1024
"""Bytes that are read of a prompt of token ids: more than ten thousand ids."""
_PROMPTS: Final = ("messages", "prompt", "text", "input_ids")

_decode = msgspec.json.decode


class Summary(msgspec.Struct, frozen=True):
    """A request body, or what is read of it.

    `members` are decoded. `size` is the whole body's, in bytes. `cut` names the member of which only a beginning
    is there: the first of `cut_bytes` bytes, of which `cut_read` were read; `complete` are its complete elements.
    `left_out` names members that were too large to be read at all.
    """

    members: dict[str, Any]
    size: int
    cut: str | None = None
    cut_bytes: int = 0
    cut_read: int = 0
    complete: Any = None
    left_out: frozenset[str] = frozenset()


def summary_of(body: Body, outline: Outline, wanted: tuple[str, ...] = _PROMPTS) -> Summary:
    """Read a body by its finished outline. `wanted` are the members that may hold the prompt, the first that is there
    does. Raises `NotReadable`. O(the bytes that are read)."""
    if outline.problem is not None:
        raise NotReadable(outline.problem)
    spans = {name: places[-1] for name, places in outline.spans.items()}
    prompt = next((name for name in wanted if name in spans), None)
    members: dict[str, Any] = {}
    left_out: set[str] = set()
    room, values = _MEMBERS_BYTES, MAX_VALUES
    try:
        for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1][1] - item[1][0]):
            size = stop - start
            if name == prompt:
                continue
            raw = body.slice(start, stop) if size <= min(room, _MEMBER_BYTES) else None
            count = count_values(raw) if raw is not None else 0
            if raw is None or count > values:
                left_out.add(name)
                continue
            members[name] = _decode(raw)
            room, values = room - size, values - count
        if prompt is None:
            return Summary(members, len(body), left_out=frozenset(left_out))
        start, stop = spans[prompt]
        raw = body.slice(start, min(stop, start + PROMPT_BYTES))
        if is_ids(raw):
            raw = raw[:_IDS_BYTES]
        found = beginning(raw, whole=stop - start == len(raw), max_values=MAX_VALUES)
        members[prompt] = found.value
        if not found.cut:
            return Summary(members, len(body), left_out=frozenset(left_out))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotReadable(f"The request body is not JSON: {error}") from error
    return Summary(members, len(body), prompt, stop - start, len(raw), found.complete, frozenset(left_out))
