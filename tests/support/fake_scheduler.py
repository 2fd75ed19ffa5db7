"""A scheduler process without a model, which starts in a moment: `python -m support.fake_scheduler` in place of ours.
Token i of an answer is the i-th token of its prompt, repeated, one every `TOKEN_S`; a vector is `vector_of` its prompt.
Special tokens of a prompt choose the behaviour: see `Magic`. The cache it reports is empty; one page is stored when a
request ends.

It answers token i of a request with the i-th token of its prompt, going round, one every `TOKEN_S`, and a request for a
vector with `vector_of` its prompt. Prompts choose what happens: see `Magic`. The cache it reports is empty; one page is
stored when a request ends.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from array import array
from dataclasses import dataclass

import msgspec
import zmq
from treeline_runtime.ipc import Heartbeat, Inbox, Outbox, Ready
from treeline_runtime.messages import (
    AbortReq,
    BatchTokenOut,
    FinishReason,
    FlushReq,
    GenerateReq,
    HeardReq,
    Reply,
    SleepReq,
    StateReq,
    StopReq,
    TokenOut,
    UpdateWeightsReq,
    WakeReq,
    decode_to_scheduler,
)
from treeline_runtime.models.pooling import pooling_of
from treeline_runtime.processes import ChildSpec, StartError, run_child
from treeline_runtime.published import CacheUpdate, LoadUpdate, Stored
from treeline_wire.media import FIRST_ID

END, END_OF_TURN = 0, 2
"""Token ids of `support.runtime_server.SPECIAL`."""
TOKEN_S = float(os.environ.get("FAKE_TOKEN_S", "0.01"))
CONTEXT = 4096


class Magic:
    """Token ids that, first in a prompt, choose a behaviour."""

    SPEAK = 57
    """The answer is the rest of the prompt, up to `END`, and ends there."""

    SILENT = 60
    """No token ever comes."""
    REFUSE = 61
    """The request is refused: the queue is full."""
    BREAK = 62
    """An error after two tokens. If `HELD` is next, only once a request begins with `LET_GO`."""
    HANG = 63
    """The process hangs."""
    DIE = 64
    """The process dies."""
    SICKEN = 65
    """From now on every request ends with an error."""
    CURE = 66
    """Requests no longer end with an error."""
    LATE = 59
    """The request's time is over after two tokens; it can be held, too."""
    HELD = 56
    LET_GO = 55
    STALL = 58
    """The process lives, but its loop stands still."""


FAILURES = {
    Magic.BREAK: FinishReason("error", message="it broke", status=500),
    Magic.LATE: FinishReason("error", message="it took too long", status=504),
}


def vector_of(ids: list[int], size: int) -> array[float]:
    """Return numbers from -4 to 4 that depend on the prompt."""
    return array("f", [(sum(ids) * 31 + i * 7) % 17 / 2 - 4 for i in range(size)])


@dataclass
class Run:
    request: GenerateReq
    produced: int = 0
    held: bool = False
    """Whether the failure is delayed."""


class FakeScheduler:
    def __init__(self, spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.inbox = Inbox(context, spec.addresses.of("scheduler"), decode_to_scheduler)
        self.detokenizer = Outbox(context, spec.addresses.of("detokenizer"))
        self.publisher = None if spec.args.no_events else Outbox(context, spec.addresses.of("publisher"))
        self.http = Outbox(context, spec.addresses.of("http"))
        self.page_size = spec.args.page_size
        self.runs: dict[str, Run] = {}
        self.outs: list[TokenOut] = []
        self.hashes = itertools.count(1)
        self.updates = 0
        self.blocks: list[dict[str, object]] = []
        self.sick = False
        self.asleep = 0
        pooling = pooling_of(spec.model_dir, spec.args.task, matryoshka=spec.args.matryoshka)
        self.size = 0 if pooling is None else pooling.size
        info: dict[str, object] = {"context_length": CONTEXT, "longest_request": CONTEXT, "max_total_tokens": 65536}
        info |= {"kv_dtype": "float32", "kv_bytes_per_token": 512, "adapters": {}}
        self.http.send(Ready("scheduler", info))

    def run(self) -> None:
        beat = 0.0
        while True:
            self.inbox.wait(int(TOKEN_S * 1000))
            for message in self.inbox.take():
                self.take(message)
            self.advance()
            if self.outs:
                self.detokenizer.send(BatchTokenOut(self.outs))
                self.outs = []
            load = self.load()
            if self.publisher is not None:
                self.publisher.send(load)
            if time.monotonic() - beat > 0.05:
                beat = time.monotonic()
                self.http.send(Heartbeat("scheduler", load))

    def load(self) -> LoadUpdate:
        return LoadUpdate(running=len(self.runs), pages_total=4096, page_size=self.page_size, max_running=64)

    def take(self, message: object) -> None:
        match message:
            case GenerateReq():
                self.start(message)
            case AbortReq(rid=rid):
                rids = [rid] if isinstance(rid, str) else rid
                for run in [run for id, run in self.runs.items() if not rid or id in rids]:
                    self.end(run, FinishReason("abort", message="aborted"))
            case StopReq(rid=rid):
                if rid in self.runs:
                    self.end(self.runs[rid], FinishReason("stop", matched=message.matched))
            case HeardReq(id=id):
                self.detokenizer.send(Reply(id))
            case FlushReq() | SleepReq() | UpdateWeightsReq() if self.runs:
                self.detokenizer.send(Reply(message.id, ok=False, message="requests are running", data={"busy": True}))
            case FlushReq(id=id):
                self.detokenizer.send(Reply(id))
            case SleepReq(id=id, level=level):
                self.asleep = level
                self.detokenizer.send(Reply(id))
            case WakeReq(id=id):
                self.asleep = 0
                self.detokenizer.send(Reply(id))
            case UpdateWeightsReq(id=id):
                self.detokenizer.send(Reply(id))
            case StateReq(id=id, what="radix"):
                self.detokenizer.send(Reply(id, data={"blocks": self.blocks, "updates": self.updates}))
            case StateReq(id=id):
                self.detokenizer.send(Reply(id, data={"running": len(self.runs), "pages_total": 4096}))

    def start(self, request: GenerateReq) -> None:
        if request.items:  # what it got, for tests to see; it answers with the text around
            with open(os.environ["FAKE_ITEMS"], "ab") as seen:
                seen.write(msgspec.json.encode(request) + b"\n")
            request = msgspec.structs.replace(request, input_ids=[id for id in request.input_ids if id < FIRST_ID])
        first = request.input_ids[0]
        if first in (Magic.SICKEN, Magic.CURE):
            self.sick = first == Magic.SICKEN
        if self.asleep:
            asleep = FinishReason("error", message="the engine is asleep", status=503)
            self.send(TokenOut(request.rid, [], asleep))
        elif self.sick:
            self.send(TokenOut(request.rid, [], FinishReason("error", message="it is sick", status=500)))
        elif first == Magic.REFUSE:
            refusal = FinishReason("error", message="the queue is full", status=503)
            self.send(TokenOut(request.rid, [], refusal))
        elif first == Magic.HANG:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif first == Magic.STALL:
            time.sleep(3600)
        elif first == Magic.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            if first == Magic.LET_GO:
                for run in self.runs.values():
                    run.held = False
            self.runs[request.rid] = Run(request, held=request.input_ids[1:2] == [Magic.HELD])

    def advance(self) -> None:
        for run in list(self.runs.values()):
            request = run.request
            first = request.input_ids[0]
            if first == Magic.SILENT:
                continue
            if first in FAILURES and run.produced == 2:
                if not run.held:
                    self.end(run, FAILURES[first])
                continue
            if run.produced == request.sampling.max_new_tokens:
                vector = vector_of(request.input_ids, self.size).tobytes() if request.pools else None
                self.end(run, FinishReason("length"), vector)
                continue
            if first == Magic.SPEAK and request.input_ids[run.produced + 1] == END:
                del self.runs[request.rid]
                run.produced += 1
                self.emit(run, [END_OF_TURN], FinishReason("stop", matched=END_OF_TURN))
                continue
            token = request.input_ids[(run.produced + (first == Magic.SPEAK)) % len(request.input_ids)]
            run.produced += 1
            done = run.produced == request.sampling.max_new_tokens
            self.emit(run, [token], FinishReason("length") if done else None)
            if done:
                del self.runs[request.rid]
                self.store(request)

    def end(self, run: Run, finish: FinishReason, vector: bytes | None = None) -> None:
        del self.runs[run.request.rid]
        self.emit(run, [], finish, vector)

    def emit(self, run: Run, tokens: list[int], finish: FinishReason | None, vector: bytes | None = None) -> None:
        request = run.request
        logprobs = [(-0.5, token) for token in tokens] if request.return_logprob else None
        self.send(
            TokenOut(
                request.rid,
                tokens,
                finish,
                prompt_tokens=len(request.input_ids),
                cached_tokens=3,
                completion_tokens=run.produced,
                vector=vector,
                output_token_logprobs=logprobs,
                output_top_logprobs=None
                if logprobs is None
                else [[one] * max(1, request.top_logprobs_num) for one in logprobs],
            )
        )

    def store(self, request: GenerateReq) -> None:
        page = request.input_ids[: self.page_size]
        if len(page) < self.page_size or self.publisher is None:
            return
        block = next(self.hashes)
        self.updates += 1
        self.publisher.send(CacheUpdate([Stored([block], None, page, request.namespace, len(page))]))
        self.blocks.append({"hash": str(block), "parent": None, "tokens": page, "namespace": request.namespace})

    def send(self, out: TokenOut) -> None:
        self.outs.append(out)


def run(spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    if signal_file := os.environ.get("FAKE_SCHEDULER_WAITS_FOR"):
        while not os.path.exists(signal_file):
            time.sleep(TOKEN_S)
    if os.environ.get("FAKE_SCHEDULER_FAILS"):
        raise StartError("the weights are missing")
    FakeScheduler(spec, context).run()


if __name__ == "__main__":
    sys.exit(run_child("scheduler", run))
