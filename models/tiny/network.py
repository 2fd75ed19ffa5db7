"""A small Qwen3 in plain torch over packed documents; weights are named as in transformers' Qwen3ForCausalLM."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. Defaults: 6.5 million parameters, 13 MB in bf16."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    max_positions: int = 8192
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-6

    def to_config(self, *, end_of_text: int, end_of_turn: int) -> dict[str, object]:
        """The contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": [end_of_turn, end_of_text],
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": end_of_text,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True)
class Packing:
    """Where the packed documents lie: `starts` [documents + 1] int32 offsets (padded with the total);
    `longest` is at least any document's length."""

    starts: Tensor
    longest: int


class Norm(nn.Module):
    """Root-mean-square norm with a gain, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Causal attention inside each packed document. q, k, v and the result: [tokens, heads, head_dim]."""
    if q.is_cuda:
        starts, longest = packing.starts, packing.longest
        attend = torch.ops.aten._flash_attention_forward
        out: Tensor = attend(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0]
        return out
    pieces = []
    offsets = packing.starts.unique().tolist()
    for start, end in itertools.pairwise(offsets):
        q1, k1, v1 = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        pieces.append(functional.scaled_dot_product_attention(q1, k1, v1, is_causal=True)[0].transpose(0, 1))
    return torch.cat(pieces)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packing: Packing) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.shape.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(self.q_norm(q), cos, sin), _rotate(self.k_norm(k), cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return self.o_proj(packed_attention(q, k, v, packing).flatten(1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packing: Packing) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, packing)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """The network; logits share the embedding matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden_size, shape.norm_eps)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
        angles = torch.arange(shape.max_positions).double()[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None], persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)

    def forward(self, ids: Tensor, positions: Tensor, packing: Packing, wanted: Tensor) -> Tensor:
        """Logits [len(wanted), vocab] at the indices `wanted` of the packed `ids` [tokens].

        `positions` [tokens] count from 0 in each document.
        """
        x = self.embed_tokens(ids)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin, packing)
        return functional.linear(self.norm(x[wanted]), self.embed_tokens.weight)

    def save(self, out: Path, *, end_of_text: int, end_of_turn: int) -> None:
        """Write model.safetensors (bf16), config.json and generation_config.json into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in self.state_dict().items()
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        config = self.shape.to_config(end_of_text=end_of_text, end_of_turn=end_of_turn)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        generation = {
            "do_sample": True,
            "eos_token_id": [end_of_turn, end_of_text],
            "max_new_tokens": 512,
            "pad_token_id": end_of_text,
            "temperature": 0.2,
            "top_p": 0.95,
        }
        (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    def load(self, path: Path) -> None:
        """Read weights that `save` wrote."""
        tensors = load_file(path)
        self.load_state_dict({name.removeprefix("model."): value.float() for name, value in tensors.items()})
