"""Trains an EAGLE-3 head for the tiny model and writes it in the form of yuhuili's and SpecForge's heads.

`python models/tiny/train_head.py --minutes 28` makes models/tiny-eagle3 again on a CPU (up to the arithmetic of the
machine). The head guesses what the model says next, from the tokens and the residual stream in three of its layers.
Training unrolls it: each pass reads the hidden states that the pass before gave for the token before, as guessing does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from network import Mlp, Norm, Packing, Qwen3, Shape, _rotate
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from train import SHORT_LIMIT, Batch, PackedCorpus, is_long_step, rate_at

HEADS, KV_HEADS, INNER, DRAFT_VOCAB = 4, 2, 512, 1536
LAYERS = (2, 3, 3)
"""The residual stream entering these layers: 2, half and all but three, of six."""
PASSES = 4
"""How far training unrolls: guesses in a row."""


class Head(nn.Module):
    """One layer over pairs of a token and the features of the token before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, dim = shape.hidden_size, shape.head_dim
        self.dim = dim
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": Norm(hidden, shape.norm_eps),
                "hidden_norm": Norm(hidden, shape.norm_eps),
                "post_attention_layernorm": Norm(hidden, shape.norm_eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * hidden, HEADS * dim, bias=False),
                        "k_proj": nn.Linear(2 * hidden, KV_HEADS * dim, bias=False),
                        "v_proj": nn.Linear(2 * hidden, KV_HEADS * dim, bias=False),
                        "o_proj": nn.Linear(HEADS * dim, hidden, bias=False),
                    }
                ),
                "mlp": Mlp(Shape(hidden_size=hidden, intermediate_size=INNER)),
            }
        )
        self.norm = Norm(hidden, shape.norm_eps)
        self.lm_head = nn.Linear(hidden, DRAFT_VOCAB, bias=False)

    def project(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """→ queries, keys, values (tokens, heads, dim)."""
        layer = self.midlayer
        x = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](hidden)), -1)
        q, k, v = (layer["self_attn"][f"{name}_proj"](x).unflatten(-1, (-1, self.dim)) for name in "qkv")
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """→ the residual stream after the layer."""
        layer = self.midlayer
        x = hidden + layer["self_attn"]["o_proj"](attended.flatten(1))
        return x + layer["mlp"](layer["post_attention_layernorm"](x))


def states(model: Qwen3, ids: Tensor, positions: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """→ the features (tokens, 3 x hidden) and the logits (tokens, vocabulary)."""
    x, cos, sin, entering = model.embed_tokens(ids), model.cos[positions], model.sin[positions], []
    for layer in model.layers:
        entering.append(x)
        x = layer(x, cos, sin, packing)
    return torch.cat([entering[i] for i in LAYERS], -1), functional.linear(model.norm(x), model.embed_tokens.weight)


def unrolled(head: Head, model: Qwen3, batch: Batch, features: Tensor, rows: Tensor) -> list[Tensor]:
    """→ for each pass the logits (rows, draft vocabulary). Pass p, counted from 0, guesses the token p + 2 after the
    row's, from its features and those that the passes before gave; where the text has ended before, they are void."""
    positions = batch.positions
    document = (positions == 0).cumsum(0)
    visible = (document[rows, None] == document) & (positions[rows, None] >= positions)

    def project(turn: int, at: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = batch.ids[(at + 1 + turn).clamp(max=len(batch.ids) - 1)]
        places = (positions[at] + turn).clamp(max=len(model.cos) - 1)
        return head.project(model.embed_tokens(tokens), hidden, model.cos[places], model.sin[places])

    every = head.fc(features)
    q, keys, values = project(0, torch.arange(len(positions)), every)
    q, hidden, found = q[rows], every[rows], []
    own: list[tuple[Tensor, Tensor]] = []
    for turn in range(PASSES):
        if turn:
            q, k, v = project(turn, rows, hidden)
            own.append((k, v))
        scores = torch.einsum("ihd,jhd->hij", q, keys).masked_fill(~visible, -torch.inf)
        diagonal = [(q * key).sum(-1).T[..., None] for key, _ in own]
        weights = (torch.cat([scores, *diagonal], -1) * head.dim**-0.5).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights[..., : len(keys)], values)
        for i, (_, value) in enumerate(own):
            attended = attended + weights[..., len(keys) + i].T[..., None] * value
        hidden = head.finish(attended, hidden)
        found.append(head.lm_head(head.norm(hidden)))
    return found


def frequent(data: PackedCorpus, count: int) -> Tensor:
    """The most frequent tokens of answers, in order of id."""
    counts = Counter[int]()
    for step in range(count):
        counts.update(t for t in data[step].targets.tolist() if t >= 0)
    ids = [token for token, _ in counts.most_common(DRAFT_VOCAB)]
    rest = [token for token in range(data.tokenizer.get_vocab_size()) if token not in counts]
    return torch.tensor(sorted([*ids, *rest[-(DRAFT_VOCAB - len(ids)) :]] if len(ids) < DRAFT_VOCAB else ids))


def save(head: Head, shape: Shape, tokens: Tensor, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": INNER,
        "max_position_embeddings": shape.max_positions,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train the head."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    here = Path(__file__).parent
    parser.add_argument("--out", type=Path, default=here.parent / "tiny-eagle3", help="directory to write the head to")
    parser.add_argument("--minutes", type=float, default=28.0)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape = Shape()
    model, head = Qwen3(shape), Head(shape)
    model.load(here / "model.safetensors")
    model.requires_grad_(False)
    data = PackedCorpus(here / "tokenizer.json", seed=1, steps=1 << 30, tokens=arguments.tokens)
    tokens = frequent(data, 200)
    place = torch.full((shape.vocab_size,), -100)
    place[tokens] = torch.arange(len(tokens))
    head.lm_head.weight.data = model.embed_tokens.weight[tokens].clone()
    head.fc.weight.data *= 0.5
    optimizer = torch.optim.AdamW(head.parameters(), lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.01)
    began, step, kept, seen = time.monotonic(), 0, [0.0] * PASSES, 0
    while (progress := (time.monotonic() - began) / 60 / arguments.minutes) < 1:
        step += 1
        if is_long_step(step):
            continue
        batch = data[step]
        positions = batch.positions
        with torch.no_grad():
            features, logits = states(model, batch.ids, positions, Packing(batch.starts, SHORT_LIMIT))
        rows = batch.wanted[batch.targets >= 0]
        says, wholes = place[logits.argmax(-1)], rows.new_ones(len(rows), dtype=torch.bool)
        loss = torch.zeros(())
        for turn, guessed in enumerate(unrolled(head, model, batch, features, rows)):
            at = (rows + turn + 1).clamp(max=len(positions) - 1)
            said = torch.isin(at, rows) & (positions[at] == positions[rows] + turn + 1)
            wanted = says[at].masked_fill(~said, -100)
            loss = loss + 0.8**turn * functional.cross_entropy(guessed, wanted, ignore_index=-100)
            wholes &= guessed.argmax(-1) == wanted
            kept[turn] += float((wholes & said).sum() / said.sum())
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * rate_at(progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += 1
        if seen == 50:
            shares = " ".join(f"{share / seen:.3f}" for share in kept)
            print(f"step {step:6d} {100 * progress:5.1f}% loss {float(loss):.3f}, right in a row {shares}", flush=True)
            kept, seen = [0.0] * PASSES, 0
    save(head, shape, tokens, arguments.out)
    print(f"saved after {step} steps", flush=True)


if __name__ == "__main__":
    main()
