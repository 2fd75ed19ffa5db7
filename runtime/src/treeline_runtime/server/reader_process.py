"""A reader process: bodies in, what they ask for out, one at a time, over the socket that is its standard input.

It ends when the socket does. Memory beyond what a body is given ends it too, and the pool starts another.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_runtime.server.errors import ApiError, UnknownModel
from treeline_runtime.server.jobs import Caller, Refused, Task
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader
from treeline_runtime.server.reader_pool import (
    BASE_MEMORY_BYTES,
    KINDS,
    MEMORY_BYTES_PER_TOKEN,
    ORDER,
    SIZE,
    ReaderSpec,
    too_costly,
)

PR_SET_PDEATHSIG = 1
TRIM_BYTES = 128 << 10
"""After a body larger than this, freed memory goes back to the system."""

logger = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


def main() -> int:
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=0)
    spec = msgspec.json.decode(_exactly(connection, SIZE.unpack(_exactly(connection, SIZE.size))[0]), type=ReaderSpec)
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
    connection.sendall(b"+")
    while True:
        try:
            kind, context, longest, named, size = ORDER.unpack(_exactly(connection, ORDER.size))
            caller = msgspec.msgpack.decode(_exactly(connection, named), type=Caller)
        except EOFError:
            return 0
        _limit_memory(loaded, size, context)
        limits = Limits(context, longest) if longest else None
        payload = _encode(_read(reader, KINDS[kind], connection, size, limits, caller))
        connection.sendall(SIZE.pack(len(payload)))
        connection.sendall(payload)
        if size > TRIM_BYTES and hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def _read(
    reader: Reader, kind: str, connection: socket.socket, size: int, limits: Limits | None, caller: Caller
) -> Task | Refused:
    body = _exactly(connection, size)
    try:
        return reader.read(kind, body, limits, caller)  # type: ignore[arg-type]
    except UnknownModel as error:
        return Refused(404, str(error), "invalid_request_error", unknown_model=error.name)
    except ApiError as error:
        told = error.body["error"]
        return Refused(error.status, told["message"], told["type"], told["param"], told["code"])
    except MemoryError:
        told = too_costly(size).body["error"]
        return Refused(413, told["message"], told["type"], told["param"], told["code"])
    except Exception:
        logger.exception("a body of %d bytes could not be read", size)
        return Refused(500, "The server failed to read the request; its log says why", "server_error")


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    view.release()
    return bytes(data)


def _limit_memory(loaded: int, size: int, context: int) -> None:
    """What one body may take beyond what was there when the process was loaded."""
    most = loaded + 3 * size + BASE_MEMORY_BYTES + MEMORY_BYTES_PER_TOKEN * context
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def _data_bytes() -> int:
    """Private memory that this process may write to, which is what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    sys.exit(main())
