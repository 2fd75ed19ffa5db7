"""The way to the detokenizers, from whoever has something for them: each request has one of them (`--detokenizers`)."""

from __future__ import annotations

import zlib

import zmq

from treeline_runtime.ipc import Addresses, Outbox, Process
from treeline_runtime.messages import BatchTokenOut, DetokenizeInit, Reply, ToDetokenizer, TokenOut


def detokenizers(count: int) -> list[Process]:
    return [Process("detokenizer", rank) for rank in range(count)]


class ToDetokenizers:
    """An outbox for all of them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses, count: int) -> None:
        self._outboxes = [Outbox(context, addresses.of(process)) for process in detokenizers(count)]

    def send(self, message: ToDetokenizer) -> bool:
        """Never blocks; False where nobody takes it any more."""
        match message:
            case BatchTokenOut() if len(self._outboxes) > 1:
                shares: list[list[TokenOut]] = [[] for _ in self._outboxes]
                for out in message.outs:
                    shares[self._owner(out.rid)].append(out)
                sent = [self._outboxes[rank].send(BatchTokenOut(outs)) for rank, outs in enumerate(shares) if outs]
                return all(sent)
            case DetokenizeInit():
                return self._outboxes[self._owner(message.rid)].send(message)
            case BatchTokenOut() | Reply():
                return self._outboxes[0].send(message)

    def _owner(self, rid: str) -> int:
        """The same in all processes, which Python's own hash is not."""
        return zlib.crc32(rid.encode()) % len(self._outboxes)
