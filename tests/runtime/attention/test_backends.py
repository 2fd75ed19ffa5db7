"""Every backend passes this suite, which uses the interface alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support import fp8
from support.runtime_engine import DenseAttention
from treeline_runtime.attention import ATTENTION_BACKENDS, AttentionBackend, Layout
from treeline_runtime.config import ConfigError
from treeline_runtime.kvcache import KVPool
from treeline_runtime.models.model_config import PLAIN, Scoring

BACKENDS = ["torch_sdpa", "dense"]
SHAPES = [(4, 4, 8), (4, 2, 8), (6, 1, 16)]
"""(heads, kv_heads, head_dim): equal, grouped, one for all."""


class World:
    """Sequences whose keys and values are in a pool at scattered pages; the same numbers, contiguous, are the truth."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        page_size: int,
        seed: int = 0,
        num_pages: int = 64,
        scales: list[tuple[float, float]] | None = None,
        scoring: Scoring = PLAIN,
    ) -> None:
        """scales: for the two layers of an fp8 cache; None: the cache is float32."""
        self.scales = scales
        self.heads, self.kv_heads, self.dim = shape
        self.page_size = page_size
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)
        self.pool = KVPool(
            num_layers=2,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
            stored=torch.float8_e4m3fn if scales else None,
            scales=scales,
        )
        self.scoring = scoring
        self.sinks = 2 * self.noise(self.heads) if scoring.sinks else None
        self.backend: AttentionBackend = ATTENTION_BACKENDS.get(name)(self.pool, self.heads, scoring)
        self.buffers: Any = None

    def capture(self, sequences: int) -> bool:
        """Plan steps into buffers from now on, if the backend has some."""
        self.buffers = self.backend.capture_buffers(sequences)
        return self.buffers is not None

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def check(self, lens: list[tuple[int, int]], layer: int = 1) -> None:
        """lens: (cached, new) of each sequence."""
        out, expected = self.attend(lens, layer)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)

    def attend(self, lens: list[tuple[int, int]], layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the backend's result, and the truth."""
        free = self.random.sample(range(self.pool.num_pages), self.pool.num_pages)
        tables, qs, ks, vs, slots, expected = [], [], [], [], [], []
        for cached, new in lens:
            total = cached + new
            pages = [free.pop() for _ in range(-(-total // self.page_size))]
            tables.append(pages)
            k, v = self.noise(total, self.kv_heads, self.dim), self.noise(total, self.kv_heads, self.dim)
            q = self.noise(new, self.heads, self.dim)
            where = torch.tensor(
                [pages[i // self.page_size] * self.page_size + i % self.page_size for i in range(total)]
            )
            self.pool.store(layer, where[:cached], k[:cached], v[:cached])
            qs.append(q)
            ks.append(k[cached:])
            vs.append(v[cached:])
            slots.append(where[cached:])
            if self.scales:
                k_seen, v_seen = (fp8.rounded(x, s).float() for x, s in zip((k, v), self.scales[layer], strict=True))
            else:
                k_seen, v_seen = k, v
            expected.append(self.truth(q, k_seen, v_seen, self.scoring.window(layer)))
        longest = max(map(len, tables))
        layout = Layout(
            q_lens=[new for _, new in lens],
            kv_lens=[cached + new for cached, new in lens],
            page_table=torch.tensor([t + [0] * (longest - len(t)) for t in tables]),
            rows=torch.arange(len(lens)),
        )
        k, v = torch.cat(ks), torch.cat(vs)
        self.pool.store(layer, torch.cat(slots), k, v)
        plan = self.backend.plan(layout, self.buffers)
        out = self.backend.forward(layer, torch.cat(qs), k, v, plan, self.sinks)
        given = torch.full_like(out, torch.nan)
        assert self.backend.forward(layer, torch.cat(qs), k, v, plan, self.sinks, given) is given
        assert torch.equal(given, out)
        return out, torch.cat(expected)

    def truth(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        new, total = q.shape[0], k.shape[0]
        k = k.repeat_interleave(self.heads // self.kv_heads, 1)
        v = v.repeat_interleave(self.heads // self.kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (self.scoring.scale or self.dim**-0.5)
        if cap := self.scoring.softcap:
            scores = cap * torch.tanh(scores / cap)
        ages = torch.arange(total - new, total)[:, None] - torch.arange(total)
        hidden = (ages < 0) | (ages >= (window or total))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None, None].expand(-1, new, 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], v).flatten(1)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


STEPS = {
    "a prompt without a prefix": [(0, 19)],
    "a prompt behind a prefix": [(16, 21)],
    "equal decodes": [(7, 1), (7, 1), (7, 1)],
    "unequal decodes": [(1, 1), (30, 1), (3, 1), (9, 1)],
    "very unequal decodes": [(1, 1), (150, 1), (3, 1), (60, 1)],
    "one token": [(0, 1)],
    "prompts, chunks and decodes": [(5, 1), (0, 9), (12, 1), (8, 6), (0, 1), (4, 1)],
    "more than a query block": [(12, 29), (4, 8), (3, 17)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_a_step_attends_to_the_right_tokens(
    backend: str,
    shape: tuple[int, int, int],
    page_size: int,
    lens: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treeline_runtime.attention.torch_sdpa.QUERY_BLOCK", 8)
    World(backend, shape, page_size, num_pages=256).check(lens)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [1, 6, 7, 1000])
def test_each_layer_has_its_window(backend: str, window: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeline_runtime.attention.torch_sdpa.QUERY_BLOCK", 8)
    world = World(backend, (4, 2, 8), page_size, num_pages=128, scoring=Scoring(windows=(None, window)))
    for layer in (0, 1):
        world.check([(0, 19)], layer)
        world.check([(16, 21), (3, 9), (0, 1)], layer)
        world.check([(9, 1), (9, 1)], layer)
        world.check([(5, 1), (0, 9), (30, 1), (8, 6), (2, 1), (40, 1)], layer)


def test_scores_are_scaled_and_capped_as_configured(backend: str) -> None:
    for scoring in (Scoring(scale=0.7), Scoring(softcap=1.5), Scoring(0.9, 2.0, (5, None))):
        world = World(backend, (6, 2, 8), 4, scoring=scoring)
        for layer in (0, 1):
            world.check([(0, 9), (12, 1), (7, 5), (3, 1)], layer)
            world.check([(9, 1), (2, 1)], layer)


@pytest.mark.parametrize("windows", [(), (None, 6)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_sees_its_heads_sinks(
    backend: str, shape: tuple[int, int, int], windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeline_runtime.attention.torch_sdpa.QUERY_BLOCK", 8)
    world = World(backend, shape, 4, num_pages=128, scoring=Scoring(windows=windows, sinks=True))
    for layer in (0, 1):
        world.check([(0, 19)], layer)
        world.check([(9, 1), (9, 1)], layer)
        world.check([(5, 1), (0, 9), (30, 1), (8, 6), (2, 1), (16, 21)], layer)


@pytest.mark.parametrize("seed", range(16))
def test_random_steps_under_random_rules(backend: str, seed: int) -> None:
    rng = random.Random(seed)
    rules = Scoring(softcap=rng.choice([None, 2.0]), windows=(None, rng.randint(1, 24)))
    scoring = rules if seed % 2 else PLAIN
    lens = [(rng.choice([0, 1, 4, 9, 20]), rng.choice([1, 1, 1, 2, 7])) for _ in range(rng.randint(1, 6))]
    World(backend, rng.choice(SHAPES), rng.choice([1, 4]), seed, num_pages=200, scoring=scoring).check(lens)


SCORINGS = {
    "plain": PLAIN,
    "window": Scoring(windows=(None, 6)),
    "capped": Scoring(softcap=2.0),
    "sinks": Scoring(windows=(6, None), sinks=True),
}


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("page_size", [16, *(pytest.param(size, marks=pytest.mark.deep) for size in (1, 64))])
@pytest.mark.parametrize(
    "lens",
    [
        [(0, 19)],
        [(16, 21)],
        [(7, 1), (7, 1)],
        [(1, 1), (300, 1), (3, 1), (90, 1)],
        [(5, 1), (0, 9), (12, 1), (64, 6), (0, 1), (4, 1)],
    ],
    ids=["prompt", "behind a prefix", "equal decodes", "unequal decodes", "mixed"],
)
def test_unseen_slots_change_no_bit(
    backend: str, page_size: int, lens: list[tuple[int, int]], scoring: Scoring
) -> None:
    outs = []
    for garbage in (0.0, torch.nan, torch.inf, -torch.inf, 3e38):
        world = World(backend, (4, 2, 8), page_size, num_pages=512, scoring=scoring)
        for part in (*world.pool.keys, *world.pool.values):
            part.fill_(garbage)
        outs.append(world.attend(lens)[0])
    assert outs[0].isfinite().all()
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


def test_steps_planned_into_buffers_find_their_pages(backend: str) -> None:
    """A captured graph does the same: the plan of each step lies where the first one did."""
    world = World(backend, (4, 2, 8), 4, scoring=Scoring(windows=(None, 6)))
    if not world.capture(sequences=2):
        pytest.skip("steps of this backend cannot be captured")
    for lens in ([(7, 1), (3, 1)], [(20, 1), (9, 1)], [(1, 1), (29, 1)]):
        world.check(lens)


@pytest.mark.parametrize("scales", [[(1.0, 1.0)] * 2, [(1.0, 1.0), (0.02, 0.005)]], ids=str)
@pytest.mark.parametrize("lens", [[(0, 19)], [(16, 21)], [(7, 1), (30, 1)], [(5, 1), (0, 9), (12, 1), (0, 1)]], ids=str)
def test_every_token_sees_the_stored_fp8_values(lens: list[tuple[int, int]], scales: list[tuple[float, float]]) -> None:
    """It holds for every token alike: those of the prompt that stored it, and those that hit it."""
    World("torch_sdpa", (4, 2, 8), 4, scales=scales).check(lens)


def test_unseen_fp8_slots_change_no_bit() -> None:
    outs = []
    for garbage in (0x00, 0x7F, 0xFF, 0x7E):
        world = World("torch_sdpa", (4, 2, 8), 4, scales=[(1.0, 1.0)] * 2)
        for part in (*world.pool.keys, *world.pool.values):
            part.view(torch.uint8).fill_(garbage)
        outs.append(world.attend([(5, 1), (0, 9), (12, 1), (17, 6)])[0])
    assert outs[0].isfinite().all()
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


def test_layers_do_not_share_memory(backend: str) -> None:
    world = World(backend, (4, 2, 8), 4)
    world.check([(4, 3)], layer=0)
    before = world.pool.keys[0].clone()
    world.check([(4, 3)], layer=1)
    assert torch.equal(world.pool.keys[0], before)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown attention backend 'fast'; known: dense, flashinfer, torch_sdpa, triton"
    ):
        ATTENTION_BACKENDS.get("fast")
    assert ATTENTION_BACKENDS.get("dense") is DenseAttention


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_backend_for_gpus_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^attention_backend {name}: it needs a CUDA device$"):
        World(name, (4, 2, 8), 4)
