"""EAGLE-3 heads of random numbers in both public forms, and what they guess, computed plainly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from treeline_runtime.scheduler.drafting import Chained

from support.runtime_engine import Harness

LAYER: dict[str, Any] = {
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
OLD, NEW = "yuhuili", "speculators"


def write_head(
    path: Path,
    target: Path,
    layers: Sequence[int],
    *,
    form: str = OLD,
    hidden: int | None = None,
    vocab: Sequence[int] | None = None,
    own_embedding: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write a head. layers: of the target, whose input it reads. hidden: its own size. vocab: the tokens that it can
    guess; None: all, by the target's head. settings: further keys of config.json."""
    model = json.loads((target / "config.json").read_text())
    of_target, count = model["hidden_size"], len(layers)
    size = hidden or of_target
    layer = LAYER | {"hidden_size": size, "vocab_size": model["vocab_size"]}
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5 * 2

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    tensors = _layer("midlayer." if form == OLD else "layers.0.", size, matrix, norm) | {
        "fc.weight": matrix(size, count * of_target),
        "norm.weight": norm(size),
    }
    if settings.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(count * of_target)
    if settings.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(of_target) for i in range(count)}
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(model["vocab_size"], size)
    if vocab is not None:
        settings["draft_vocab_size"] = len(vocab)
        tensors["lm_head.weight"] = matrix(len(vocab), size)
        tensors["d2t"] = torch.tensor(vocab) - torch.arange(len(vocab))
        tensors["t2d"] = torch.isin(torch.arange(model["vocab_size"]), torch.tensor(vocab))
    if hidden is not None:
        settings["target_hidden_size"] = of_target
    if form == OLD:
        ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers]}}
        config = layer | {"architectures": ["LlamaForCausalLMEagle3"]} | ids | settings
    else:
        config = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": list(layers)} | settings
        config |= {"transformer_layer_config": layer, "architectures": ["Eagle3Speculator"]}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def _layer(
    prefix: str, size: int, matrix: Callable[..., torch.Tensor], norm: Callable[[int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    heads, kv_heads, dim, inner = (
        LAYER[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    )
    return {
        f"{prefix}self_attn.q_proj.weight": matrix(heads * dim, 2 * size),
        f"{prefix}self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * size),
        f"{prefix}self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * size),
        f"{prefix}self_attn.o_proj.weight": matrix(size, heads * dim),
        f"{prefix}mlp.gate_proj.weight": matrix(inner, size),
        f"{prefix}mlp.up_proj.weight": matrix(inner, size),
        f"{prefix}mlp.down_proj.weight": matrix(size, inner),
        f"{prefix}input_layernorm.weight": norm(size),
        f"{prefix}hidden_norm.weight": norm(size),
        f"{prefix}post_attention_layernorm.weight": norm(size),
    }


class Plain:
    """A head by the description of its format: no cache, all positions each time, one head of attention at a time."""

    def __init__(self, path: Path, target: Path, layers: Sequence[int]) -> None:
        config = json.loads((path / "config.json").read_text())
        self.config = config
        self.layer = config.get("transformer_layer_config", config)
        self.layers = layers
        found = load_file(path / "model.safetensors")
        self.tensors = {name.replace("layers.0.", "midlayer."): value for name, value in found.items()}
        self.target = load_file(target / "model.safetensors")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt() * self.tensors[name]

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """states[i] (tokens, hidden): what enters layer i of the target."""
        parts = [states[i] for i in self.layers]
        if self.config.get("fc_norm"):
            parts = [self._norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.config.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm.weight")
        return joined @ self.tensors["fc.weight"].T

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x (positions, dim)"""
        first, second = x.chunk(2, -1)
        half = first.shape[-1]
        angles = torch.arange(len(x))[:, None] * self.layer["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _attended(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs (positions, 2 x hidden) → attention of the last one."""
        dim, groups = self.layer["head_dim"], self.layer["num_attention_heads"] // self.layer["num_key_value_heads"]
        out = []
        for head in range(self.layer["num_attention_heads"]):
            q, k, v = (
                self.tensors[f"midlayer.self_attn.{name}_proj.weight"].unflatten(0, (-1, dim))[at]
                for name, at in (("q", head), ("k", head // groups), ("v", head // groups))
            )
            scores = self._rotated(inputs @ k.T) @ self._rotated(inputs @ q.T)[-1] * dim**-0.5
            out.append(scores.softmax(0) @ inputs @ v.T)
        return self.tensors["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)

    def guesses(self, tokens: Sequence[int], states: Sequence[torch.Tensor], count: int) -> list[int]:
        """tokens: all known ones, of which the last one is not in `states` yet → the next ones."""
        embedding = self.tensors.get("embed_tokens.weight", self.target["model.embed_tokens.weight"])
        hidden = list(self.features(states)[: len(tokens) - 1])
        known, found = list(tokens), list[int]()
        for _ in range(count):
            embedded = self._norm(embedding[known[1:]], "midlayer.input_layernorm.weight")
            inputs = torch.cat((embedded, self._norm(torch.stack(hidden), "midlayer.hidden_norm.weight")), -1)
            normed = self._norm(hidden[-1], "midlayer.hidden_norm.weight")
            before = self.config.get("norm_before_residual", "transformer_layer_config" in self.config)
            x = self._attended(inputs) + (normed if before else hidden[-1])
            inner = self._norm(x, "midlayer.post_attention_layernorm.weight")
            gate, up, down = (self.tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + down @ (torch.nn.functional.silu(gate @ inner) * (up @ inner))
            normed = self._norm(x, "norm.weight")
            head = self.tensors.get("lm_head.weight", self.target.get("lm_head.weight"))
            assert head is not None
            token = int((head @ normed).argmax())
            if "d2t" in self.tensors:
                token += int(self.tensors["d2t"][token])
            found.append(token)
            known.append(token)
            hidden.append(normed if self.config.get("norm_output") else x)
        return found


def heard(engine: Harness) -> dict[tuple[int, ...], list[int]]:
    """Return all tokens of a request → the guesses that came with the last one, from now on."""
    speculation, found = engine._speculation, dict[tuple[int, ...], list[int]]()
    assert isinstance(speculation, Chained)
    learn = speculation.learn

    def noting(req: Any, taken: list[int], arrived: list[int]) -> None:
        learn(req, taken, arrived)
        if arrived and req.tokens[-len(taken) :] == taken:  # else it ends before them
            found[tuple(req.tokens)] = arrived

    speculation.learn = noting  # type: ignore[method-assign]
    return found
