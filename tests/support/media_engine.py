"""A small model that reads images: an encoder of one product, positions of three axes, and its plain computation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from treeline_runtime.attention import ATTENTION_BACKENDS, Layout
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.context import Context
from treeline_runtime.kvcache import KVPool
from treeline_runtime.messages import GenerateReq, MediaItem, SamplingParams
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.model_config import MRopeConfig
from treeline_runtime.models.mrope import MRope
from treeline_wire.media import item_digest, item_ids

from support.runtime_engine import Harness, dummy_model

IMAGE, VIDEO = 95, 94
"""Placeholders."""
PIXELS, DEPTH, MERGE = 4, 2, 2
"""Numbers of a patch; further features of a token; patches of a token in a row and a column."""


class Picture:
    """An image, or a video of several frames: its pixels, of which the seed decides."""

    def __init__(self, folder: Path, seed: int, rows: int, columns: int, frames: int = 1) -> None:
        """rows, columns: of tokens."""
        self.kind, self.count = "image" if frames == 1 else "video", frames * rows * columns
        self.grid = frames, rows * MERGE, columns * MERGE
        rng = np.random.default_rng([seed, *self.grid])
        self.pixels: npt.NDArray[np.float32] = rng.normal(size=(self.count * MERGE**2, PIXELS)).astype(np.float32)
        self.digest = item_digest(self.kind, self.pixels.tobytes(), "fake")
        self.path = folder / self.digest.hex()
        if not self.path.exists():
            self.pixels.tofile(self.path)

    def at(self, start: int) -> MediaItem:
        kind: Any = self.kind
        return MediaItem(kind, start, self.count, self.digest, self.grid, self.pixels.shape, str(self.path))


Part = list[int] | Picture


def ids_of(parts: Sequence[Part]) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Return the ids and the items of a prompt."""
    ids, items = list[int](), list[MediaItem]()
    for part in parts:
        if isinstance(part, Picture):
            items.append(part.at(len(ids)))
            ids += item_ids(part.digest, part.count)
        else:
            ids += part
    return ids, tuple(items)


class Encoder:
    """Embeddings are one product with the pixels of a token. Remembers what it encoded, by call."""

    depth = DEPTH

    def __init__(self, hidden: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._weight = torch.randn(MERGE**2 * PIXELS, (1 + DEPTH) * hidden, generator=generator) / 8
        self.calls: list[list[bytes]] = []

    def encode(self, items: Sequence[tuple[MediaItem, torch.Tensor]]) -> list[torch.Tensor]:
        self.calls.append([item.digest for item, _ in items])
        return [pixels.reshape(-1, MERGE**2 * PIXELS) @ self._weight for _, pixels in items]

    @property
    def encoded(self) -> list[bytes]:
        return list(itertools.chain.from_iterable(self.calls))


def reading(model: Decoder) -> Decoder:
    """Give a model an encoder, and positions of three axes."""
    model.media = Encoder(model.config.hidden_size)
    mrope, placeholders = MRopeConfig((0, 1, 2, 0), MERGE), {"image": IMAGE, "video": VIDEO}
    model.mrope = MRope(mrope, *model.rope)
    model.config = dataclasses.replace(model.config, mrope=mrope, placeholders=placeholders)
    return model


class MediaHarness(Harness):
    def __init__(self, model: Path, **settings: Any) -> None:
        settings = {"seed": 1} | settings  # the model is shared with tests of this seed alone
        defaults = {"load_format": "dummy", "context_length": settings.get("context_length"), "seed": settings["seed"]}
        self.model = reading(dummy_model(SchedulerConfig(model=str(model), **defaults)))
        assert isinstance(self.model.media, Encoder)
        self.encoder = self.model.media
        super().__init__(model, **settings)

    def ask(self, rid: str, parts: Sequence[Part], **options: Any) -> None:
        """Submit a prompt of texts and images; greedy by default."""
        names = set(GenerateReq.__struct_fields__)
        request = {name: options.pop(name) for name in list(options) if name in names}
        ids, items = ids_of(parts)
        sampling = SamplingParams(**({"temperature": 0.0, "max_new_tokens": 6} | options))
        self.inbox.append(GenerateReq(rid, ids, sampling, items=items, **request))

    def answer(self, rid: str, parts: Sequence[Part], **options: Any) -> list[int]:
        """Ask, run to the end, and return the output."""
        self.ask(rid, parts, **options)
        self.run()
        return self.tokens(rid)


@torch.inference_mode()
def plain_logits(model: Decoder, parts: Sequence[Part], output: Sequence[int] = ()) -> torch.Tensor:
    """Return the logits after every token of a prompt and its output, computed at once and without any cache, with
    embeddings and positions put in by hand."""
    shown, embedded, positions = list[int](), list[torch.Tensor](), list[list[int]]()
    hidden, position = model.config.hidden_size, 0
    assert isinstance(model.media, Encoder)
    assert model.mrope is not None
    for part in (*parts, list(output)):
        if isinstance(part, Picture):
            placeholder = IMAGE if part.kind == "image" else VIDEO
            shown += [placeholder] * part.count
            embedded.append(torch.from_numpy(part.pixels).reshape(part.count, -1) @ model.media._weight)
            frames, rows, columns = part.grid[0], part.grid[1] // MERGE, part.grid[2] // MERGE
            for frame, row, column in itertools.product(range(frames), range(rows), range(columns)):
                positions.append([position + frame, position + row, position + column])
            position += max(frames, rows, columns)
        else:
            shown += part
            embedded.append(
                torch.cat(
                    (model.embed(torch.tensor(part, dtype=torch.int64)), torch.zeros(len(part), DEPTH * hidden)), 1
                )
            )
            positions += [[at] * 3 for at in range(position, position + len(part))]
            position += len(part)
    both, size, config = torch.cat(embedded), len(shown), model.config
    cos, sin = model.mrope.tables(torch.tensor(positions).t())
    pool = KVPool(
        num_layers=config.num_layers, num_pages=1, page_size=size, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    attention = ATTENTION_BACKENDS.get("torch_sdpa")(pool, config.num_heads, config.scoring)
    plan = attention.plan(
        Layout([size], [size], torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    )
    deep = both[:, hidden:].unflatten(1, (DEPTH, hidden)).transpose(0, 1)
    context = Context(attention, plan, torch.arange(size), cos, sin, deep=deep)
    return model.logits(model.forward(both[:, :hidden].clone(), context))


def plain_answer(model: Decoder, parts: Sequence[Part], length: int) -> list[int]:
    """Return the greedy output, each token by a computation of everything before it."""
    output: list[int] = []
    for _ in range(length):
        output.append(int(plain_logits(model, parts, output)[-1].argmax()))
    return output
