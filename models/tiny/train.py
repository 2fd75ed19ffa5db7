"""Trains the tiny model and writes it in Hugging Face's layout.

`python models/tiny/train.py --out models/tiny` makes the committed weights again (up to the arithmetic of the machine;
the stream of training data is the same everywhere). On a CPU pass a smaller `--steps` or a `--minutes` limit.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import corpus
import numpy as np
import tokenizer as tiny_tokenizer
import torch
from network import Packing, Qwen3, Shape
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

Ids = NDArray[np.int64]
SHORT_LIMIT = 1024
LONG_EVERY = 5
MIN_DOCUMENT = 16


class Batch(NamedTuple):
    """One packed step. ids, positions: [tokens]; starts: [documents + 1] padded; wanted, targets: [loss slots],
    with the target −100 where a slot is unused."""

    ids: Tensor
    positions: Tensor
    starts: Tensor
    wanted: Tensor
    targets: Tensor


class PackedCorpus(Dataset[Batch]):
    """Step number → packed batch, a pure function of (seed, step). Every fifth step is of long documents."""

    def __init__(self, tokenizer_file: Path, *, seed: int, steps: int, tokens: int, first: int = 0) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.seed, self.steps, self.tokens, self.first = seed, steps, tokens, first
        self.end_of_text, self.im_start, self.im_end = (
            self.tokenizer.token_to_id(token) for token in tiny_tokenizer.SPECIAL_TOKENS
        )
        (self.assistant,) = self.tokenizer.encode("assistant").ids
        (self.newline,) = self.tokenizer.encode("\n").ids

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        step += self.first
        rng = random.Random(f"{self.seed} {step}")
        is_long = is_long_step(step)
        limit = tiny_tokenizer.MAX_LENGTH if is_long else SHORT_LIMIT
        ids: list[Ids] = []
        masks: list[NDArray[np.bool_]] = []
        room = self.tokens
        while room >= MIN_DOCUMENT:
            for one, mask in self._documents(rng, is_long):
                if len(one) <= min(limit, room):
                    ids.append(one)
                    masks.append(mask)
                    room -= len(one)
                elif room < limit:
                    room = 0
                    break
        return self._packed(ids, masks, limit)

    def _documents(self, rng: random.Random, is_long: bool) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """A handful of encoded documents, each with the mask of the tokens that bear loss."""
        if is_long:
            characters = [int(math.exp(rng.uniform(math.log(1000), math.log(26_000)))) for _ in range(8)]
            documents = [corpus.long_document(rng, count) for count in characters]
        else:
            documents = [corpus.short_document(rng) for _ in range(256)]
        pieces = [
            piece for document in documents for piece in (document.text, document.completion) if piece is not None
        ]
        encoded = iter(self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
        result = []
        for document in documents:
            ids = np.asarray(next(encoded).ids, dtype=np.int64)
            if document.completion is None:
                result.append((ids, self._assistant_mask(ids)))
            else:
                tail = np.asarray([*next(encoded).ids, self.end_of_text], dtype=np.int64)
                mask = np.concatenate((np.zeros(len(ids), dtype=bool), np.ones(len(tail), dtype=bool)))
                result.append((np.concatenate((ids, tail)), mask))
        return result

    def _assistant_mask(self, ids: Ids) -> NDArray[np.bool_]:
        """True on what the assistant says, its end token included."""
        opening = (ids[:-2] == self.im_start) & (ids[1:-1] == self.assistant) & (ids[2:] == self.newline)
        starts = np.flatnonzero(opening) + 3
        ends = np.flatnonzero(ids == self.im_end)
        ends = ends[np.searchsorted(ends, starts)]
        change = np.zeros(len(ids) + 1, dtype=np.int64)
        np.add.at(change, starts, 1)
        np.add.at(change, ends + 1, -1)
        return np.cumsum(change[:-1]) > 0

    def _packed(self, ids: list[Ids], masks: list[NDArray[np.bool_]], limit: int) -> Batch:
        used = sum(len(one) for one in ids)
        while used < self.tokens:  # fill up with documents that bear no loss
            size = min(limit, self.tokens - used)
            ids.append(np.full(size, self.end_of_text, dtype=np.int64))
            masks.append(np.zeros(size, dtype=bool))
            used += size
        lengths = np.array([len(one) for one in ids])
        starts = np.full(self.tokens // MIN_DOCUMENT + 2, self.tokens, dtype=np.int32)
        starts[0] = 0
        starts[1 : len(lengths) + 1] = np.cumsum(lengths)
        flat, mask = np.concatenate(ids), np.concatenate(masks)
        positions = np.arange(self.tokens) - np.repeat(starts[: len(lengths)], lengths)
        slots = self.tokens // 2
        found = (np.flatnonzero(mask) - 1)[:slots]
        wanted = np.zeros(slots, dtype=np.int64)
        targets = np.full(slots, -100, dtype=np.int64)
        wanted[: len(found)] = found
        targets[: len(found)] = flat[found + 1]
        return Batch(*(torch.from_numpy(array) for array in (flat, positions, starts, wanted, targets)))


def is_long_step(step: int) -> bool:
    """Whether this step trains on documents of up to 8192 tokens."""
    return step % LONG_EVERY == LONG_EVERY - 1


def optimizers(model: Qwen3, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the gains."""
    matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    others = [
        parameter for name, parameter in model.named_parameters() if parameter.ndim != 2 or name.startswith("embed")
    ]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda),
    ]


def rate_at(progress: float) -> float:
    """The learning rate's factor after this part of the run: short warm-up, plateau, linear decay to nothing."""
    return min(1.0, progress / 0.01 + 0.01, max(0.0, (1.0 - progress) / 0.45))


def train(arguments: argparse.Namespace) -> None:
    """The training loop."""
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    data = PackedCorpus(
        arguments.out / "tokenizer.json",
        seed=arguments.seed,
        steps=arguments.steps,
        tokens=arguments.tokens,
        first=arguments.first_step,
    )
    model = Qwen3(Shape())
    if arguments.resume:
        model.load(arguments.resume)
    model.to(device)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.2f} M parameters on {device}, {arguments.tokens} tokens a step", flush=True)

    def loss_of(batch: Batch, longest: int) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(batch.ids, batch.positions, Packing(batch.starts, longest), batch.wanted)
        return functional.cross_entropy(logits.float(), batch.targets, ignore_index=-100)

    step_loss = torch.compile(loss_of) if on_gpu else loss_of
    chosen = optimizers(model, arguments.rate)
    workers = arguments.workers
    loader = DataLoader(
        data, batch_size=None, num_workers=workers, pin_memory=on_gpu, prefetch_factor=4 if workers else None
    )
    began = time.monotonic()
    losses: dict[bool, list[Tensor]] = {False: [], True: []}
    for step, loaded in enumerate(loader):
        minutes = (time.monotonic() - began) / 60
        progress = max(step / arguments.steps, minutes / arguments.minutes)
        if progress >= 1:
            print(f"stopped by the time limit at step {step}", flush=True)
            break
        batch = Batch(*(tensor.to(device, non_blocking=True) for tensor in loaded))
        is_long = is_long_step(step + arguments.first_step)
        loss = step_loss(batch, tiny_tokenizer.MAX_LENGTH if is_long else SHORT_LIMIT)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = arguments.rate * rate_at(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses[is_long].append(loss.detach())
        if step < 5 or step % arguments.report_every == 0:
            means = {name: float(torch.stack(values).mean()) if values else math.nan for name, values in losses.items()}
            losses = {False: [], True: []}
            speed = (step + 1) * arguments.tokens / (time.monotonic() - began)
            report = f"loss short {means[False]:.4f} long {means[True]:.4f} {speed / 1e3:.0f}k tokens/s"
            print(f"step {step:6d} {100 * progress:5.1f}% {report}", flush=True)
    ends = {"end_of_text": data.end_of_text, "end_of_turn": data.im_end}
    model.save(arguments.out, **ends)
    print(f"saved after {(time.monotonic() - began) / 60:.1f} minutes", flush=True)


def main() -> None:
    """Train the tiny model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="directory to write the model to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2800, help="optimizer steps in all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop (decayed) after so many minutes")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens a step, at least 8192")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 2), help="data processes")
    parser.add_argument("--resume", type=Path, help="a model.safetensors to start from")
    parser.add_argument("--first-step", type=int, default=0, help="where in the stream of data to start")
    parser.add_argument("--report-every", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.tokens < tiny_tokenizer.MAX_LENGTH:
        parser.error(f"--tokens must be at least {tiny_tokenizer.MAX_LENGTH}")
    if not (arguments.out / "tokenizer.json").exists():
        tiny_tokenizer.save(tiny_tokenizer.train(arguments.seed), arguments.out)
    train(arguments)


if __name__ == "__main__":
    main()
