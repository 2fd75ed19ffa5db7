"""Finds the top-level members of a large JSON object, in slices and without decoding the rest.

Theory of operation. Decoding megabytes of JSON takes longer than an event loop may be held, and a hostile document
takes ten times longer than an honest one of its size. The picker needs only a few short members, and the beginning of
the prompt. So the document is walked piece by piece by whole-array operations whose cost depends only on the number of
bytes: escapes are masked, quotes split the bytes into text and structure, a running sum of brackets gives the depth,
and commas and colons at depth 1 delimit the members. A piece inside of one string is skipped. Other tasks may run
between two pieces.

It is no validator: the runtime reports errors in the rest of the document.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from treeline_wire.json_values import MAX_SLOW, count_values, mask_escapes, outside_strings, slow_numbers

from treeline_epp.requests.body import Body, Buffer, Edit

MAX_MEMBERS = 1024
"""Most members at the top level. Known requests have some thirty."""
MAX_DEPTH = 512
_NAME_BYTES = 4096
_QUOTE, _COMMA, _COLON, _OPEN, _CLOSE = (ord(char) for char in '",:{}')
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_SPACE = b" \t\r\n"
_decode = msgspec.json.decode
_NOT_JSON = "The request body is not JSON."

LONG_STRING: Final = 1024
"""Bytes of a string from which on it is looked at for an image."""

Bools = npt.NDArray[np.bool_]
Depths = npt.NDArray[np.int32]


def structure(masked: bytes, inside: bool, depth: int) -> tuple[Bools, Depths]:
    """Return for each byte whether it is structure (in no string, and no opening quote), and the depth after it.

    `inside` and `depth` are the state before the first byte. O(bytes).
    """
    chars = np.frombuffer(masked, np.uint8)
    text = np.bitwise_xor.accumulate((chars == _QUOTE).view(np.uint8))
    outside = text == (1 if inside else 0)
    steps = _STEPS[chars]
    steps *= outside
    depths: Depths = np.cumsum(steps, dtype=np.int32)
    depths += depth
    return outside, depths


class NotReadable(ValueError):
    """The body cannot be read; the message says why, to the client."""


class Outline:
    """The members of one object. Feed it the body's pieces in order, then `finish`.

    `problem` is the fault of the document (a sentence for the client), or None. `spans` maps each member's name to the
    places of its values: `(first byte, byte after the last)`, several if it is repeated. `long_strings` are the places
    of strings of at least `LONG_STRING` bytes; `contents` puts stand-ins in the place of those that are images and the
    like (`content.hash_contents`).
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.long_strings: list[tuple[int, int]] = []
        self.contents: list[Edit] = []
        self._at = self._quoted = 0
        self._inside = self._escaped = False
        self._depth = 0
        self._begun = self._ended = False
        self._marks: list[tuple[int, bool]] = []  # place, is it a colon?
        self.first = 0
        """The place after the object's opening brace."""

    def feed(self, piece: Buffer) -> None:
        """Take the next bytes. O(bytes), whatever they are."""
        data = bytes(piece)
        start, self._at = self._at, self._at + len(data)
        if self.problem is not None or not data:
            return
        try:
            self._read(data, start)
        except NotReadable as problem:
            self.problem = str(problem)

    def _read(self, data: bytes, start: int) -> None:
        if not self._begun:
            stripped = data.lstrip(_SPACE)
            if not stripped:
                return
            if stripped[0] != _OPEN:
                raise NotReadable("The request body must be a JSON object.")
            self._begun = True
            self.first = start + len(data) - len(stripped) + 1
        masked = self._masked(data)
        if not self._inside or b'"' in masked:
            self._walk(masked, start)

    def _masked(self, data: bytes) -> bytes:
        """Mask escapes; one may be split between two pieces."""
        if self._escaped:
            data = b"_" + data[1:]
            self._escaped = False
        if not data.endswith(b"\\"):
            return mask_escapes(data)
        data = data.replace(b"\\\\", b"__")
        if data.endswith(b"\\"):
            self._escaped = True
            data = data[:-1] + b"_"
        return data.replace(b'\\"', b"__")

    def _walk(self, masked: bytes, start: int) -> None:
        outside, depths = structure(masked, self._inside, self._depth)
        self._note_long_strings(masked, start)
        if masked.count(b'"') & 1:
            self._inside = not self._inside
        low, high = int(depths.min()), int(depths.max())
        self._depth = int(depths[-1])
        if high > MAX_DEPTH:
            raise NotReadable(f"The request body is nested more than {MAX_DEPTH} levels deep.")
        if low > 1:
            return
        chars = np.frombuffer(masked, np.uint8)
        if low <= 0:
            rest = masked if self._ended else b""
            closed = np.flatnonzero((depths == 0) & outside & (chars == _CLOSE))
            if len(closed) and not self._ended:
                self._ended = True
                end = int(closed[0])
                self._marks.append((start + end, False))
                rest = masked[end + 1 :]
            if low < 0 or rest.strip(_SPACE):  # only blanks may follow the object
                raise NotReadable(_NOT_JSON)
        marks = np.flatnonzero(((chars == _COMMA) | (chars == _COLON)) & outside & (depths == 1))
        if len(self._marks) + len(marks) > 2 * MAX_MEMBERS:
            raise NotReadable(f"The request body has more than {MAX_MEMBERS} members.")
        self._marks += [(start + at, masked[at] == _COLON) for at in marks.tolist()]

    def _note_long_strings(self, masked: bytes, start: int) -> None:
        quotes = np.flatnonzero(np.frombuffer(masked, np.uint8) == _QUOTE) + start
        if len(quotes):
            gaps = np.diff(quotes, prepend=self._quoted)
            for at in np.flatnonzero(gaps > LONG_STRING).tolist():
                begin = int(quotes[at - 1]) if at else self._quoted
                self.long_strings.append((begin + 1, int(quotes[at])))
            self._quoted = int(quotes[-1])

    def finish(self, body: Body) -> None:
        """Find the names, when all pieces of `body` were fed. O(members)."""
        if self.problem is not None:
            return
        try:
            self._find_names(body)
        except NotReadable as problem:
            self.problem = str(problem)

    def _find_names(self, body: Body) -> None:
        if not self._begun or not self._ended or self._inside:
            raise NotReadable(_NOT_JSON)
        self._marks.sort()
        begin, colon = self.first, -1
        stop = min(self._marks[0][0], begin + _NAME_BYTES)
        if len(self._marks) == 1 and not body.slice(begin, stop).strip(_SPACE):
            return  # an empty object: its only mark is its end
        for at, is_colon in self._marks:
            if is_colon == (colon >= 0):  # a second colon, or no first one
                raise NotReadable(_NOT_JSON)
            if is_colon:
                colon = at
                continue
            name = _name(body, begin, colon)
            self.spans.setdefault(name, []).append((colon + 1, at))
            begin, colon = at + 1, -1


def _name(body: Body, start: int, stop: int) -> str:
    if stop - start > _NAME_BYTES:
        raise NotReadable("The request body has a member whose name is too long.")
    try:
        return _decode(body.slice(start, stop), type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise NotReadable(_NOT_JSON) from None


def is_ids(raw: bytes) -> bool:
    """Return whether a list of numbers begins here."""
    start = raw[:256].lstrip(_SPACE)
    return start[:1] == b"[" and start[1:].lstrip(_SPACE)[:1].isdigit()


class Beginning(msgspec.Struct, frozen=True):
    """The beginning of a value. `complete` are the whole elements of a list: those of `value` without the last one if
    that had to be closed.
    """

    value: Any
    cut: bool = False
    complete: Any = None


def beginning(raw: bytes, *, whole: bool, max_values: int) -> Beginning:
    """Decode the value of which `raw` is the beginning (all of it: `whole`).

    A list loses its missing elements, and those beyond `max_values` values; a string that is cut keeps its beginning if
    its element can be closed after it. None for values without a beginning (a number, an object, many slow numbers).
    Raises `msgspec.MsgspecError`, `UnicodeDecodeError` or `RecursionError` for invalid JSON.
    """
    raw = raw.lstrip(_SPACE)
    if whole and count_values(raw) <= max_values:
        return Beginning(_decode(raw))
    if raw[:1] == b'"':
        return Beginning(_closed(raw, b""), True)
    if raw[:1] != b"[" or slow_numbers(outside_strings(raw)) > MAX_SLOW:
        return Beginning(None, True)
    outside, depths = structure(mask_escapes(raw), False, 0)
    stop = len(raw)
    if not is_ids(raw):
        chars = np.frombuffer(raw, np.uint8)
        values = np.flatnonzero(outside & ((chars == _COMMA) | (_STEPS[chars] > 0)))
        if len(values) > max_values:
            stop = int(values[max_values])
        elif not outside[-1]:
            closed = _closed(raw, _closers(raw, outside, depths))
            if closed is not None:
                return Beginning(closed, True, _whole_elements(raw, stop, outside, depths))
    elements = _whole_elements(raw, stop, outside, depths)
    return Beginning(elements, True, elements)


def _whole_elements(raw: bytes, stop: int, outside: Bools, depths: Depths) -> Any:
    outside, depths = outside[:stop], depths[:stop]
    chars = np.frombuffer(raw, np.uint8)[:stop]
    commas = np.flatnonzero(outside & (depths == 1) & (chars == _COMMA))
    return _decode(raw[: int(commas[-1])] + b"]") if len(commas) else []


def _closers(raw: bytes, outside: Bools, depths: Depths) -> bytes:
    """Return the brackets that close those open at the end."""
    steps = _STEPS[np.frombuffer(raw, np.uint8)] * outside
    opened = np.flatnonzero(steps > 0)
    out = bytearray()
    for depth in range(int(depths[-1]), 0, -1):
        at = int(opened[np.flatnonzero(depths[opened] == depth)[-1]])
        out += b"]" if raw[at : at + 1] == b"[" else b"}"
    return bytes(out)


def _closed(raw: bytes, closers: bytes) -> Any:
    """Decode the value with its last string closed here, or just before an escape or character that is cut."""
    for back in range(13):
        try:
            return _decode(raw[: len(raw) - back] + b'"' + closers)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return None


MAX_VALUES: Final = 4096
"""Most values (of objects and lists) that are read of one body: reading and rendering take time for each."""
PROMPT_BYTES: Final = 192 * 1024
"""Most bytes that are read of a prompt, of any other member, and of all others together."""
_MEMBER_BYTES: Final = 128 * 1024
_MEMBERS_BYTES: Final = 192 * 1024
_IDS_BYTES: Final = 64 * 1024
"""Most bytes that are read of a prompt of token ids: more than ten thousand ids."""
_PROMPTS: Final = ("messages", "prompt", "text", "input_ids")


class Summary(msgspec.Struct, frozen=True):
    """A request body, or the part of it that is read.

    `members` are decoded, with stand-ins for images. `size` is the whole body's with them, in bytes. `cut` names the
    member of which only the beginning is present: the first `cut_read` of `cut_bytes` bytes; `complete` are its
    complete elements. `left_out` names members that were too large to read.
    """

    members: dict[str, Any]
    size: int
    cut: str | None = None
    cut_bytes: int = 0
    cut_read: int = 0
    complete: Any = None
    left_out: frozenset[str] = frozenset()


def summary_of(body: Body, outline: Outline, wanted: tuple[str, ...] = _PROMPTS) -> Summary:
    """Read a body by its finished outline. `wanted` are the members that may hold the prompt; the first present one
    does. Raises `NotReadable`. O(bytes read).
    """
    if outline.problem is not None:
        raise NotReadable(outline.problem)
    spans = {name: places[-1] for name, places in outline.spans.items()}
    if outline.contents:
        body, spans = _with_stand_ins(body, spans, outline.contents)
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


def _with_stand_ins(
    body: Body, spans: dict[str, tuple[int, int]], edits: list[Edit]
) -> tuple[Body, dict[str, tuple[int, int]]]:
    """Return the edited body, and the places of its members there. O(pieces + edits + members)."""
    stops = [edit.stop for edit in edits]
    shifts = [0, *itertools.accumulate(len(edit.text) - (edit.stop - edit.start) for edit in edits)]

    def moved(place: int) -> int:
        return place + shifts[bisect_right(stops, place)]

    return body.edited(edits), {name: (moved(start), moved(stop)) for name, (start, stop) in spans.items()}
