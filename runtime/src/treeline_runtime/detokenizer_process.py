"""The detokenizer process: token ids to text, and stop strings.

A stop string ends a request here first: its text is sent as finished at once, the scheduler gets a StopReq, and its
further outputs are dropped until its final message.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
from tokenizers import Tokenizer

from treeline_runtime.ipc import HEARTBEAT_S, HeartbeatSender, Inbox, Outbox, Ready
from treeline_runtime.messages import (
    BatchTextOut,
    BatchTokenOut,
    DetokenizeInit,
    FinishReason,
    Logprobs,
    Reply,
    StopReq,
    TextLogprob,
    TextOut,
    ToDetokenizer,
    TokenLogprob,
    TokenOut,
    ToTokenizer,
    decode_to_detokenizer,
    encode,
)
from treeline_runtime.processes import ChildSpec, run_child
from treeline_runtime.tokens import IncrementalDetokenizer

TOKEN_TEXTS = 65_536
"""Cached texts of single tokens, for logprobs."""
MESSAGE_SIZE = 256
"""Outputs in one message to an HTTP process, and positions of a prompt whose log probabilities come together."""
LOGPROB_BYTES = 4096
"""Values of log probabilities, vectors or hidden states that count as another output."""


@dataclass(slots=True)
class _Request:
    """A request between its DetokenizeInit and its final TokenOut."""

    init: DetokenizeInit
    text: IncrementalDetokenizer
    stopped: TextOut | None = None
    """The text has ended at a stop string, which the scheduler does not know yet."""


@dataclass
class DetokenizerOutput:
    """The results of a turn's messages."""

    to_http: list[ToTokenizer] = field(default_factory=list)
    to_scheduler: list[StopReq] = field(default_factory=list)


class DetokenizerCore:
    """The process without sockets: messages in, messages out."""

    def __init__(self, decode: Callable[[list[int], bool], str]) -> None:
        """`decode`: (token ids, skip special tokens) → text."""
        self._decode = decode
        self._requests: dict[str, _Request] = {}
        self._early: dict[str, list[TokenOut]] = {}
        """Outputs that overtook their DetokenizeInit: it travels on another connection."""
        self._token_text = functools.lru_cache(TOKEN_TEXTS)(lambda id: decode([id], False))

    def take(self, messages: Iterable[ToDetokenizer]) -> DetokenizerOutput:
        """Handles messages in order; texts of neighbouring batches leave together."""
        turn, texts = DetokenizerOutput(), _Texts()
        for message in messages:
            match message:
                case DetokenizeInit():
                    text = IncrementalDetokenizer.of(message, self._decode)
                    self._requests[message.rid] = _Request(message, text)
                    for out in self._early.pop(message.rid, ()):
                        self._push(out, texts, turn)
                case BatchTokenOut():
                    for out in message.outs:
                        self._push(out, texts, turn)
                case Reply():
                    turn.to_http += [*texts.batches, message]
                    texts = _Texts()
        turn.to_http += texts.batches
        return turn

    def _push(self, out: TokenOut, texts: _Texts, turn: DetokenizerOutput) -> None:
        request = self._requests.get(out.rid)
        if request is None:
            self._early.setdefault(out.rid, []).append(out)
            return
        if out.finish is not None:
            del self._requests[out.rid]
        if request.stopped is not None:
            if out.finish is not None and request.init.waits_for_end:
                texts.append(_ended(request.stopped, out))
            return
        delta = request.text.push(out.token_ids, out.finish, withdrawn=out.withdrawn)
        finish = out.finish
        if delta.matched is not None:
            finish = FinishReason("stop", matched=delta.matched)
        if delta.unused:
            out = out.without(delta.unused)
        with_text = request.init.return_logprob_text
        *parts, rest = _parts(out)
        for part in parts:
            texts.append(self._text_out(part, "", None, with_text=with_text))
        last = self._text_out(rest, delta.text, finish, with_text=with_text)
        if finish is not None and out.finish is None:
            request.stopped = last
            turn.to_scheduler.append(StopReq(out.rid, delta.matched))
            if request.init.waits_for_end:
                last = msgspec.structs.replace(last, finish=None)
        texts.append(last)

    def _text_out(self, out: TokenOut, text: str, finish: FinishReason | None, *, with_text: bool) -> TextOut:
        return TextOut(
            rid=out.rid,
            text=text,
            token_ids=out.token_ids,
            finish=finish,
            prompt_tokens=out.prompt_tokens,
            cached_tokens=out.cached_tokens,
            completion_tokens=out.completion_tokens,
            retractions=out.retractions,
            speculated=out.speculated,
            queued_s=out.queued_s,
            logprobs=self._logprobs(out, with_text),
            vector=out.vector,
            hidden_states=out.hidden_states,
            withdrawn=out.withdrawn,
        )

    def _logprobs(self, out: TokenOut, with_text: bool) -> list[msgspec.Raw]:
        if out.output_token_logprobs is None and out.input_token_logprobs is None:
            return []
        tops, input_tops = out.output_top_logprobs, out.input_top_logprobs
        made = Logprobs(
            self._texts(out.output_token_logprobs, with_text),
            None if tops is None else [self._texts(one, with_text) or [] for one in tops],
            self._texts(out.input_token_logprobs, with_text),
            None if input_tops is None else [self._texts(one, with_text) for one in input_tops],
        )
        return [msgspec.Raw(encode(made))]

    def _texts(self, logprobs: Sequence[TokenLogprob] | None, with_text: bool) -> list[TextLogprob] | None:
        if logprobs is None:
            return None
        return [(value, id, self._token_text(id) if with_text else None) for value, id in logprobs]


def _ended(stopped: TextOut, out: TokenOut) -> TextOut:
    """The rest of a request that a stop string ended, when its final message `out` arrives: hidden states up to the
    stop, although the scheduler computed one token more."""
    states = out.hidden_states
    if states is not None:
        rows = stopped.prompt_tokens + max(stopped.completion_tokens - 1, 0) - states.first
        states = msgspec.structs.replace(states, data=states.data[: 4 * states.size * rows])
    return msgspec.structs.replace(stopped, text="", token_ids=[], withdrawn=0, logprobs=[], hidden_states=states)


class _Texts:
    """Texts for the HTTP process, in messages that hold its event loop for a few milliseconds at most."""

    def __init__(self) -> None:
        self.batches: list[BatchTextOut] = []
        self._size = MESSAGE_SIZE

    def append(self, out: TextOut) -> None:
        if self._size >= MESSAGE_SIZE:
            self.batches.append(BatchTextOut([]))
            self._size = 0
        self.batches[-1].outs.append(out)
        states = b"" if out.hidden_states is None else out.hidden_states.data
        large = sum(map(len, out.logprobs)) + len(out.vector or b"") + len(states)
        self._size += 1 + large // LOGPROB_BYTES


def _parts(out: TokenOut) -> list[TokenOut]:
    """The message; many log probabilities of a prompt come in more of them, `MESSAGE_SIZE` positions in each."""
    chosen, tops = out.input_token_logprobs, out.input_top_logprobs
    if chosen is None or len(chosen) <= MESSAGE_SIZE:
        return [out]
    parts = [TokenOut(out.rid, [], prompt_tokens=out.prompt_tokens, cached_tokens=out.cached_tokens)]
    parts = parts * ((len(chosen) - 1) // MESSAGE_SIZE) + [out]
    spans = [slice(MESSAGE_SIZE * i, MESSAGE_SIZE * (i + 1)) for i in range(len(parts))]
    return [
        msgspec.structs.replace(part, input_token_logprobs=chosen[span], input_top_logprobs=tops and tops[span])
        for part, span in zip(parts, spans, strict=True)
    ]


def run(spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    tokenizer = Tokenizer.from_file(f"{spec.model_dir}/tokenizer.json")
    core = DetokenizerCore(lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip)))
    inbox = Inbox(context, spec.addresses.of("detokenizer"), decode_to_detokenizer)
    http = Outbox(context, spec.addresses.of("http"))
    scheduler = Outbox(context, spec.addresses.of("scheduler"))
    gc.collect()
    gc.freeze()  # the tokenizer stays
    http.send(Ready("detokenizer", {}))
    heartbeat = HeartbeatSender("detokenizer", http)
    while True:
        heartbeat.beat()
        inbox.wait(int(HEARTBEAT_S * 1000))
        turn = core.take(inbox.take())
        for message in turn.to_http:
            http.send(message)
        for stop in turn.to_scheduler:
            scheduler.send(stop)


if __name__ == "__main__":
    sys.exit(run_child("detokenizer", run))
