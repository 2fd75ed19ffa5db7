"""The process that reads bodies: `python -m treeline_runtime.server.reader_process`. See `confined.child`.

Memory beyond a body's limit ends it, and the pool starts another.
"""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_runtime.confined.child import serve
from treeline_runtime.processes import setup_logging
from treeline_runtime.server import reader_pool
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import Refused, Task
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader

os.environ["TOKENIZERS_PARALLELISM"] = "false"

UNREADABLE = ApiError(500, "The server failed to read the request; its log says why")

logger = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    """Serves requests from standard input until its end. The first is a `ReaderSpec` in JSON; each other is the length
    in four bytes, an `Order` in MessagePack, and the body."""
    reader: Reader | None = None
    loaded_bytes = 0
    decode = msgspec.msgpack.Decoder(reader_pool.Order).decode

    def answer(frame: bytearray) -> bytes:
        nonlocal reader, loaded_bytes
        if reader is None:
            reader = _load(msgspec.json.decode(frame, type=reader_pool.ReaderSpec))
            loaded_bytes = _data_bytes()
            return b""
        size = reader_pool.ORDER_HEADER.unpack_from(frame)[0]
        order = decode(memoryview(frame)[reader_pool.ORDER_HEADER.size : reader_pool.ORDER_HEADER.size + size])
        del frame[: reader_pool.ORDER_HEADER.size + size]
        _limit_memory(loaded_bytes, order)
        return _encode(_read(reader, order, frame))

    serve(answer)


def _load(spec: reader_pool.ReaderSpec) -> Reader:
    setup_logging("reader", spec.log_level, spec.log_format)
    prompts = Prompts(TokenizerBundle.from_dir(spec.model_dir))
    return Reader(spec.model_name, prompts, spec.defaults, spec.pooling, spec.formats, spec.media)


def _read(reader: Reader, order: reader_pool.Order, body: bytearray) -> Task | Refused:
    try:
        return reader.read(order.kind, body, order.limits, order.caller)
    except ApiError as error:
        return Refused.of(error)
    except MemoryError:
        return Refused.of(reader_pool.too_costly(order.size))
    except Exception:
        logger.exception("a body of %d bytes could not be read", order.size)
        return Refused.of(UNREADABLE)


def _limit_memory(loaded: int, order: reader_pool.Order) -> None:
    """Limits one body's memory beyond that of the loaded process."""
    context = 0 if order.limits is None else order.limits.context_length
    most = loaded + 3 * order.size + reader_pool.BASE_MEMORY_BYTES + reader_pool.MEMORY_BYTES_PER_TOKEN * context
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def _data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    main()
