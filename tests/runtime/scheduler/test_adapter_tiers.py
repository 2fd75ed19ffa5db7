"""Pages of adapters below the device and between runtimes: only those of the same adapter are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq
from support import pulling_engine, tiered_engine
from support.adapter_engine import of
from support.adapters import write_adapter
from support.runtime_engine import Harness, prompt

PROMPT = [*prompt(0, 96), 1]
Q = {f"layers.{i}.self_attn.q_proj": (32, 32) for i in range(2)}


@pytest.fixture
def modules(tmp_path: Path) -> tuple[str, ...]:
    return tuple(f"{name}={write_adapter(tmp_path / name, Q, seed=seed)}" for seed, name in enumerate("ab"))


def loaded(engine: Harness, modules: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Load both; return the namespaces of their requests."""
    engine.adapters.load_now(modules)
    return of(engine.adapters.names["a"]), of(engine.adapters.names["b"])


def settings(modules: tuple[str, ...]) -> dict[str, Any]:
    return {"lora_modules": modules}


def test_pages_come_back_from_the_host_for_the_same_adapter_alone(tiny: Path, modules: tuple[str, ...]) -> None:
    alone = Harness(tiny, **settings(modules))
    expected = [alone.generate(str(i), PROMPT, namespace=of_one) for i, of_one in enumerate(loaded(alone, modules))]
    with tiered_engine.engine(tiny, **settings(modules)) as engine:
        one, other = loaded(engine, modules)
        for name in ("first", "second"):  # a page is stored at its second use
            assert engine.generate(name, PROMPT, namespace=one) == expected[0]
        for i in range(4):
            engine.generate(f"other {i}", prompt(9 + i, 96))
        assert engine.generate("b", PROMPT, namespace=other) == expected[1]
        assert engine.last("b").cached_tokens == 0
        assert engine.load().resident == sorted(engine.adapters.names.values())
        assert engine.generate("a", PROMPT, namespace=one) == expected[0]
        assert engine.last("a").cached_tokens == 96
        assert tiered_engine.report(engine).total_loaded_tokens["CPU"] > 0


def test_another_runtime_lends_pages_of_the_same_adapter_alone(
    tiny: Path, context: zmq.Context[Any], modules: tuple[str, ...]
) -> None:
    with (
        pulling_engine.engine(tiny, context, **settings(modules)) as there,
        pulling_engine.engine(tiny, context, **settings(modules[::-1])) as here,
    ):
        one, other = loaded(there, modules)
        assert loaded(here, modules[::-1]) == (one, other), "whatever the order and the slots"
        expected = there.generate("there", PROMPT, namespace=one)
        with pulling_engine.lending(there, context) as address:
            for name, namespace, cached in (("base", None, 0), ("b", other, 0), ("a", one, 96)):
                here.generate(name, PROMPT, namespace=namespace, pages_from=address)
                assert here.last(name).cached_tokens == cached
        assert here.tokens("a") == expected
