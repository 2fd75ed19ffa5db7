"""Replaces SGLang's kernels for CPUs, for which no wheel exists (`scripts/engine_cpu.sh` installs it beside SGLang).

SGLang imports their names wherever it runs on a CPU. With attention and sampling by torch, and without Intel's AMX, a
text model without speculative decoding calls none of them: SGLang's own code and torch compute all. This module
computes nothing, so it can compute nothing wrong: a call of any kernel fails by name.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name}: there are no kernels of SGLang's here")

    return absent
