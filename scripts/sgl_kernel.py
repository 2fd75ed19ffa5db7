"""In place of SGLang's kernels for CPUs, of which there is no wheel (`scripts/engine_cpu.sh` puts it beside SGLang).

SGLang imports their names wherever it runs on a CPU. With attention and sampling by torch, and without Intel's AMX, a
text model without speculative decoding calls none of them: all is computed by SGLang's own code and torch. Nothing is
computed here, so that nothing can be computed wrongly: what is called after all fails by name.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name}: there are no kernels of SGLang's here")

    return absent
