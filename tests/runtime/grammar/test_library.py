"""xgrammar is imported without its optional heavy imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from treeline_runtime.grammar.backends import Backends
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar
backend = Backends(Vocabulary([bytes([i]) for i in range(256)] + [b""], {{}}, (256,)))
compiled = backend.load(backend.compile(Grammar("ebnf", 'root ::= "a" "b"* "c"')))
assert compiled.matcher((256,)).forced() == "a"
print(*sorted({{"torch", "transformers"}} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    ("missing", "imported"),
    [
        pytest.param({"torch", "transformers"}, "", id="in a process that compiles"),
        pytest.param({"transformers"}, "", id="in an image, which has no transformers"),
    ],
)
def test_importing_xgrammar_loads_neither_torch_nor_transformers(missing: set[str], imported: str) -> None:
    script = SCRIPT.format(missing=missing)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == imported
