"""A reader process: bodies in, what they ask for out, one at a time, over the socket that is its standard input.

It ends when the socket does. Memory beyond what a body is given ends it too, and the pool starts another.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import socket
import sys
from pathlib import Path

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_runtime.confined.child import READY
from treeline_runtime.confined.frames import read_frame, send_frame
from treeline_runtime.parent_end import end_with_parent
from treeline_runtime.server.errors import ApiError, UnknownModel
from treeline_runtime.server.jobs import Refused, Task
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader
from treeline_runtime.server.reader_pool import (
    BASE_MEMORY_BYTES,
    MEMORY_BYTES_PER_TOKEN,
    Order,
    ReaderSpec,
    too_costly,
)

TRIM_BYTES = 128 << 10
"""After a body larger than this, freed memory goes back to the system."""

logger = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


def main() -> int:
    end_with_parent()
    libc, connection = ctypes.CDLL(None), socket.socket(fileno=0)
    first = read_frame(connection)
    if first is None:
        return 0
    spec = msgspec.json.decode(first, type=ReaderSpec)
    logging.basicConfig(
        stream=sys.stderr,
        level=spec.log_level.upper(),
        format="%(asctime)s %(levelname)-7s reader      %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    prompts = Prompts(TokenizerBundle.from_dir(spec.model_dir))
    reader = Reader(spec.model_name, prompts, spec.defaults, spec.pooling, spec.formats)
    loaded = _data_bytes()
    send_frame(connection, READY)
    decode = msgspec.msgpack.Decoder(Order).decode
    while (frame := read_frame(connection)) is not None:
        order = decode(frame)
        _limit_memory(loaded, order)
        body = read_frame(connection)
        if body is None:
            return 0
        payload = _encode(_read(reader, order, body))
        del body
        send_frame(connection, payload)
        if order.size > TRIM_BYTES and hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
    return 0


def _read(reader: Reader, order: Order, body: bytearray) -> Task | Refused:
    try:
        return reader.read(order.kind, body, order.limits, order.caller)
    except UnknownModel as error:
        return Refused(404, str(error), "invalid_request_error", unknown_model=error.name)
    except ApiError as error:
        told = error.body["error"]
        return Refused(error.status, told["message"], told["type"], told["param"], told["code"])
    except MemoryError:
        told = too_costly(order.size).body["error"]
        return Refused(413, told["message"], told["type"], told["param"], told["code"])
    except Exception:
        logger.exception("a body of %d bytes could not be read", order.size)
        return Refused(500, "The server failed to read the request; its log says why", "server_error")


def _limit_memory(loaded: int, order: Order) -> None:
    """What one body may take beyond what was there when the process was loaded."""
    context = 0 if order.limits is None else order.limits.context_length
    most = loaded + 3 * order.size + BASE_MEMORY_BYTES + MEMORY_BYTES_PER_TOKEN * context
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def _data_bytes() -> int:
    """Private memory that this process may write to, which is what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    sys.exit(main())
