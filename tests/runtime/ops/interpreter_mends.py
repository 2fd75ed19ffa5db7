"""Triton's interpreter (3.9), with one fault repaired and repeated work avoided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from treeline_runtime.models.quantization.fp8 import E4M3
from triton import language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Apply the repairs. Call it before the first kernel."""
    _convert_fp8_as_torch_does()
    _patch_the_language_once_a_kernel()
    _leave_out_what_nobody_looks_at()


def _convert_fp8_as_torch_does() -> None:
    """The interpreter makes 16 of 31.9 as fp8: it rounds the mantissa up and forgets the carry. So conversions from and
    to fp8 are torch's here; on a GPU they are the device's."""
    theirs = interpreter._convert_float
    kinds = {tl.float8e4nv: E4M3, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32}

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return theirs(data, source, target, mode)
        size = target.primitive_bitwidth // 8
        numbers = torch.from_numpy(np.frombuffer(data.tobytes(), np.uint8).copy()).view(kinds[source])
        converted = numbers.to(kinds[target]).view(torch.uint8).numpy()
        return converted.view(f"uint{8 * size}").reshape(data.shape)

    interpreter._convert_float = convert


def _patch_the_language_once_a_kernel() -> None:
    """A kernel replaces the language's functions by interpreted ones until it ends. Each call of a function in it
    repeats all of that, though the replacement in a module lasts: once is enough."""
    theirs, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def patch(fn: Any) -> Any:
        if id(fn.__globals__) in done:
            return None  # of functions in a kernel, which put nothing back
        done.add(id(fn.__globals__))
        return theirs(fn)

    def run_and_forget(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()  # when a kernel ends, its own module is put back
        run(self, *args, **kwargs)

    interpreter._patch_lang = patch
    interpreter.GridExecutor.__call__ = run_and_forget


def _leave_out_what_nobody_looks_at() -> None:
    """The interpreter repeats all integer sums and products in 64 bits to check for overflow, a third of all time. Only
    `debug` reads the result."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
