"""The memory of grammars, as the kernel sees it: once they are forgotten, the process is as small as before."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from treeline_runtime.grammar.compiler import CompileLimits, GrammarCompiler
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar

pytestmark = pytest.mark.deep

CACHE, SLACK = 16 << 20, 72 << 20
GRAMMARS = 16


def resident() -> int:
    """Return the anonymous resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def storm() -> None:
    """Print the process's growth, at the end and at most, after reading a grammar of 3 MB again and again."""
    vocabulary = Vocabulary([*(bytes([i]) for i in range(256)), b""], {}, (256,))
    limits = CompileLimits(cache_bytes=CACHE, workers=2)
    compiler = GrammarCompiler(lambda: vocabulary, on_done=lambda: None, limits=limits)
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefghij", k=200)) for _ in range(80)]

    def grammar(*more: str) -> Grammar:
        elements = [{"type": "const_string", "value": text} for text in (*texts, *more)]
        return Grammar("structural_tag", json.dumps({"format": {"type": "or", "elements": elements}}))

    compiler.get(grammar()).result(60)
    ask, answers = compiler._ask, list[bytearray]()

    def asked_once(grammar: Any, loaded: Any, on_late: Any = None) -> bytearray:
        if not answers:
            answers.append(ask(grammar, loaded, on_late))
        return answers[0]

    compiler._ask = asked_once  # type: ignore[method-assign]
    compiler.get(grammar("0")).result(60)
    before, counted = resident(), compiler.num_bytes
    futures = [compiler.get(grammar(str(i))) for i in range(1, GRAMMARS)]
    for future in futures:
        future.result(60)
    del future, futures
    compiler._settle()
    kept = compiler.num_bytes
    compiler.close()
    assert compiler._threads is not None
    compiler._threads.shutdown()
    sys.stdout.write(json.dumps([resident() - before, kept - counted]))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_after_a_storm_of_large_grammars_the_process_is_as_large_as_the_cache() -> None:
    folder = Path(__file__).parent
    child = subprocess.run(
        [sys.executable, "-c", "import test_memory; test_memory.storm()"],
        cwd=folder,
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    grown, counted = json.loads(child.stdout)
    assert counted <= CACHE
    assert grown < CACHE + SLACK
