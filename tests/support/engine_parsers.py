"""vLLM's and SGLang's own command-line parsers, run in processes of their own.

Each program below reads one command line (a JSON list) from each line of its input, and writes what its engine makes of
it: a JSON object for each, of names and values. One that the engine refuses ends it, with the engine's words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EACH = """
import dataclasses, json, os, sys

def plain(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else repr(value)

def tell(read):
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print what they think of the machine
    for line in sys.stdin:
        told.write(json.dumps(vars(read(json.loads(line))), default=plain) + "\\n")
    told.close()
"""
_VLLM = f"""{_EACH}
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

command, parser = ServeSubcommand(), FlexibleArgumentParser()
command.subparser_init(parser.add_subparsers())

tell(lambda words: parser.parse_args(["serve", *words]))
"""
_SGLANG = f"""{_EACH}
import argparse, types
from unittest.mock import MagicMock

# What SGLang imports and its parser does not use; and its packages without what they do when they are imported.
sys.modules |= {{name: MagicMock(name=name) for name in ("orjson", "pybase64")}}
for name in ("sglang", "sglang.srt"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(sys.argv[1], *name.split("."))]

from sglang.srt.disaggregation.kv_events import KVEventsConfig
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)

def read(words):
    found = parser.parse_args(words)
    if found.kv_events_config is not None:
        found.kv_events_config = KVEventsConfig.from_cli(found.kv_events_config).model_dump()
    return found

tell(read)
"""
_QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def read_by_vllm(python: Path, *lines: Sequence[str]) -> list[dict[str, Any]]:
    """Parse command lines by the `vllm serve` of an environment."""
    return _read([str(python), "-c", _VLLM], lines)


def read_by_sglang(folder: Path, *lines: Sequence[str]) -> list[dict[str, Any]]:
    """Parse command lines by SGLang's `ServerArgs`, whose modules are in the folder's `sglang`."""
    return _read([sys.executable, "-c", _SGLANG, str(folder)], lines)


def _read(command: list[str], lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    told = "".join(json.dumps(list(line)) + "\n" for line in lines)
    environment = {**os.environ, **_QUIET}
    done = subprocess.run(
        command, input=told, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
