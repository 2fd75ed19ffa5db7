"""Interprets a picker's answers to the request half of a stream as Envoy does: messages in, facts and faults out, no
I/O.

A fault is kept by the name of the rule that it breaks, and reading goes on: the cases on that rule check it, and all
others use the facts that can still be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from treeline_wire import envoy_pb2 as pb

from treeline_conformance.messages import DESTINATION, LB, Mode

CHUNK_LIMIT: Final = 64 * 1024
"""Envoy refuses longer chunks of a streamed body."""
_SOMETIMES: Final = {
    pb.HeaderValueOption.ADD_IF_ABSENT: "ADD_IF_ABSENT: what the client sent stays",
    pb.HeaderValueOption.OVERWRITE_IF_EXISTS: "OVERWRITE_IF_EXISTS: it is not set where the client sent none",
}
"""Actions that set a header for some requests only. Without one, and without `append`, Envoy overwrites."""
_ORDER: Final = ("request_headers", "request_body", "request_trailers")


@dataclass(frozen=True)
class Refusal:
    """An ImmediateResponse: the answer that the client would get."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class RequestReading:
    """The facts and faults so far. Feed `take` each answer. `sent_chunks` and `ended` are the proxy's progress with the
    body, for `complete`.
    """

    mode: Mode
    has_body: bool
    trailers: bool = False
    sent_chunks: int = 0
    ended: bool = False
    header: str | None = None
    """The destination in a header mutation that takes effect."""
    metadata: str | None = None
    """The destination in dynamic metadata."""
    set_headers: dict[str, str] = field(default_factory=dict)
    removed_headers: set[str] = field(default_factory=set)
    kinds: list[str] = field(default_factory=list)
    refusal: Refusal | None = None
    chunks: list[bytes] = field(default_factory=list)
    replaced: bytes | None = None
    eos: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    clears_route_cache: bool = False

    def take(self, response: pb.ProcessingResponse) -> None:
        """Read one answer."""
        kind = response.WhichOneof("response") or "nothing"
        if self.refusal is not None:
            self._fault("immediate", f"{kind} follows an immediate response")
        self._take_metadata(response)
        if kind == "immediate_response":
            self.refusal = _refusal(response.immediate_response)
            return
        if kind not in _ORDER:
            self._fault("order", f"{kind} is no answer to what was sent")
            return
        if self.kinds and _ORDER.index(kind) < _ORDER.index(self.kinds[-1]):
            self._fault("order", f"{kind} comes after {self.kinds[-1]}")
        if kind != "request_body" and kind in self.kinds:
            self._fault("order", f"{kind} is answered twice")
        self.kinds.append(kind)
        part = getattr(response, kind)
        common = part if kind == "request_trailers" else part.response
        counts = kind == "request_headers" or (kind == "request_body" and self.mode is Mode.BUFFERED)
        self._take_headers(common.header_mutation, counts=counts)
        if kind != "request_trailers":
            self.clears_route_cache |= common.clear_route_cache
            if kind == "request_body":
                self._take_body(common)

    def complete(self) -> bool:
        """Return whether all expected answers have come."""
        if self.refusal is not None:
            return True
        if "request_headers" not in self.kinds or (self.trailers and "request_trailers" not in self.kinds):
            return False
        answers = self.kinds.count("request_body")
        if not self.has_body or self.mode is Mode.NONE:
            return True
        if self.mode is Mode.DUPLEX:
            ended = self.eos > 0 or self.trailers
            return ended or (answers >= self.sent_chunks > 0 and "streamed" in self.faults)
        return answers >= self.sent_chunks

    def body(self, sent: bytes) -> bytes:
        """Return the body that the upstream gets, for the body that was sent."""
        if self.mode is Mode.DUPLEX and self.has_body:
            return b"".join(self.chunks)
        return sent if self.replaced is None else self.replaced

    def _fault(self, rule: str, words: str) -> None:
        self.faults.setdefault(rule, words)

    def _take_metadata(self, response: pb.ProcessingResponse) -> None:
        fields = response.dynamic_metadata.fields
        if LB in fields and DESTINATION in fields[LB].struct_value.fields:
            value = fields[LB].struct_value.fields[DESTINATION]
            if value.WhichOneof("kind") != "string_value":
                self._fault("metadata", "the destination in the metadata is no string")
            self.metadata = value.string_value

    def _take_headers(self, mutation: Any, *, counts: bool) -> None:
        for option in mutation.set_headers:
            name, value = option.header.key.lower(), option.header.raw_value.decode(errors="replace")
            if option.header.value and not value:
                self._fault("raw_value", f"the value of {name} is not in raw_value, where Envoy looks for it")
                value = option.header.value
            if option.HasField("append") and option.append.value:
                self._fault("append", f"{name} is appended to what the client sent")
            if name == DESTINATION and option.append_action in _SOMETIMES:
                self._fault("action", f"append_action of {name} is {_SOMETIMES[option.append_action]}")
            if not counts:
                self._fault("late_header", f"{name} is set by an answer whose header mutations count for nothing")
                continue
            self.set_headers[name] = value
            if name == DESTINATION:
                self.header = value
        if counts:
            self.removed_headers |= {name.lower() for name in mutation.remove_headers}

    def _take_body(self, common: pb.CommonResponse) -> None:
        which = common.body_mutation.WhichOneof("mutation")
        if self.mode is not Mode.DUPLEX:
            if which == "streamed_response":
                self._fault("streamed", "streamed_response is for full duplex alone")
            elif which == "body":
                self.replaced = common.body_mutation.body
            elif which == "clear_body" and common.body_mutation.clear_body:
                self.replaced = b""
            return
        if which != "streamed_response":
            self._fault(
                "streamed", "in full duplex Envoy takes a body by streamed_response alone, and refuses this answer"
            )
            return
        chunk = common.body_mutation.streamed_response
        if self.eos:
            self._fault("eos", "something follows the end of the body")
        if len(chunk.body) > CHUNK_LIMIT:
            self._fault("chunk", f"a chunk has {len(chunk.body):,} bytes, more than Envoy takes")
        self.chunks.append(bytes(chunk.body))
        self.eos += chunk.end_of_stream


def _refusal(response: pb.ImmediateResponse) -> Refusal:
    options = response.headers.set_headers
    found = {o.header.key.lower(): o.header.raw_value.decode(errors="replace") or o.header.value for o in options}
    return Refusal(int(response.status.code), found, bytes(response.body))
