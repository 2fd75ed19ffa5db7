"""Engines that were measured: files of step times beside the constants that were fitted to them."""

from __future__ import annotations

from importlib.resources import files

import msgspec

from treeline_bench.sim.model.speed import Speed


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps in milliseconds by name (`prefill.N`: a prompt of N tokens, in as many steps as it takes;
    `decode.bN.ctxC`: N sequences of C tokens), and constants. `chunk_tokens` are computed in one step."""

    chunk_tokens: int
    anchors_ms: dict[str, float]
    speed: Speed


def read(name: str) -> Measured:
    """One of those that come with this package."""
    text = files("treeline_bench.sim.model").joinpath(f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=Measured)


def anchors_of(measured: Measured) -> dict[str, float]:
    """The same steps as the model has them, in milliseconds."""
    found = {}
    for name in measured.anchors_ms:
        kind, *numbers = name.split(".")
        if kind == "prefill":
            tokens, chunk = int(numbers[0]), measured.chunk_tokens
            parts = ((min(chunk, tokens - before), before) for before in range(0, tokens, chunk))
            found[name] = 1000 * sum(measured.speed.prefill_s(*part) for part in parts)
        else:
            batch, context = int(numbers[0].removeprefix("b")), int(numbers[1].removeprefix("ctx"))
            found[name] = 1000 * measured.speed.step_s(batch, batch * context)
    return found
