"""Parses a large tokenizer in a child process, which ends with it.

The `tokenizers` library parses a document of two hundred thousand tokens in half a second and Python takes as long
again, in calls during which no other thread of the process runs: the event loop would wait for two seconds. So a child
parses it and tests its keys; its result is read within milliseconds. `python -m treeline_epp.keyers.made_apart` is the
child: the document on its standard input, a `Made` on its standard output.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Final

import msgspec
from treeline_wire.keys import KeySelfTestError, KeyTable, PrefixKeys
from treeline_wire.tokenizer import BundleError

LARGE_CHARS: Final = 2 << 20
"""Smaller documents are parsed in this process: within 100 ms, in calls of at most 40 ms."""
TIMEOUT_S: Final = 300.0
_PIECE: Final = 1 << 20


class Made(msgspec.Struct, frozen=True):
    """The keys of a tokenizer, or why it has none."""

    table: KeyTable | None = None
    problem: str = ""


def proven_keys(tokenizer_json: str) -> PrefixKeys:
    """Return a tokenizer's keys after their self-test. Blocks; a large one is parsed in a child. Raises ValueError."""
    if len(tokenizer_json) < LARGE_CHARS:
        return _tested(tokenizer_json)
    made = _made_by_child(tokenizer_json)
    if made.table is None:
        raise KeySelfTestError(made.problem)
    return PrefixKeys.from_table(made.table)


def _tested(tokenizer_json: str) -> PrefixKeys:
    keys = PrefixKeys(tokenizer_json)
    keys.self_test()
    return keys


def _made_by_child(tokenizer_json: str) -> Made:
    # The document may be hostile: the child gets none of our arguments, and only Python's part of the environment.
    command = [sys.executable, "-m", __spec__.name if __spec__ is not None else __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        too_long = threading.Timer(TIMEOUT_S, child.kill)
        too_long.start()
        try:
            with child.stdin as into:
                for at in range(0, len(tokenizer_json), _PIECE):
                    into.write(tokenizer_json[at : at + _PIECE].encode())
            out = child.stdout.read()
        except OSError as error:
            raise BundleError(f"reading the tokenizer in a process of its own failed: {error!r}") from error
        finally:
            too_long.cancel()
            child.wait()
    if child.returncode != 0:
        raise BundleError(f"the process that reads the tokenizer ended with status {child.returncode}")
    return msgspec.msgpack.decode(out, type=Made)


def main() -> None:
    """Run the child."""
    try:
        made = Made(_tested(sys.stdin.buffer.read().decode()).table())
    except ValueError as error:
        made = Made(problem=str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(made))


if __name__ == "__main__":
    main()
