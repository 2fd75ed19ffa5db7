"""Counts a model's parameters and their bytes, part by part. No torch here.

It reads the same `ModelConfig` as the decoder; `tests/runtime/models/test_sizes.py` compares the counts with the
decoder's own and with transformers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from treeline_runtime.models.model_config import AudioConfig, ModelConfig, TowerConfig, VisionConfig
from treeline_runtime.models.quantization.scheme import BLOCK, Scheme
from treeline_runtime.models.shards import WHOLE, Rank, own

SCALE_BYTES = 4


@dataclass(frozen=True)
class Part:
    """parameters: all; active: the ones that a single token is multiplied with; bytes: of a rank."""

    name: str
    parameters: int
    active: int
    bytes: int


def parts_of(
    model: ModelConfig, element_bytes: int, scheme: Scheme | None = None, rank: Rank = WHOLE, ep_size: int = 1
) -> list[Part]:
    """element_bytes: of a number that is not quantised. scheme: how projections are quantised. rank: whose bytes are
    counted. ep_size: the ranks over which whole experts are divided."""
    mine = replace(own(model, rank, ep_size), vocab_size=-(-model.vocab_size // rank.count))
    each = {part.name: part.bytes for part in _parts(mine, element_bytes, scheme, rank)}
    if "experts" in each:
        each["experts"] //= ep_size
    return [replace(part, bytes=each.get(part.name, 0)) for part in _parts(model, element_bytes, scheme, WHOLE)]


def _parts(model: ModelConfig, element_bytes: int, scheme: Scheme | None, stage: Rank) -> list[Part]:
    """The parts of a model that consists of one stage's layers. stage: says whether it has embedding, norm and head."""
    hidden, layers = model.hidden_size, model.num_layers
    dense = layers - (len(model.moe.layers) if model.moe else 0)
    matrix = model.vocab_size * hidden
    inner, bias = model.intermediate_size, model.mlp_bias
    gated = [(inner, hidden, bias), (inner, hidden, bias), (hidden, inner, bias)]
    tied = model.tie_word_embeddings
    embedding = matrix if stage.is_first_stage or (tied and stage.is_last_stage) else 0
    head = matrix if stage.is_last_stage and not tied else 0
    found = [
        # of the embedding a token reads one row; where it is the head too, all of it
        Part("embedding", embedding, embedding if tied else 0, embedding * element_bytes),
        Part("language-model head", head, head, head * element_bytes),
        _projections("attention", layers, _attention(model), _attention_rest(model), element_bytes, scheme),
        _projections("feed-forward", dense, gated, 0, element_bytes, scheme),
        *_experts(model, element_bytes),
        _norms(model, element_bytes, stage),
        _vision(model.vision if stage.is_first_stage else None, element_bytes),
        _audio(model.audio, element_bytes),
    ]
    return [part for part in found if part.parameters]


Projection = tuple[int, int, bool]
"""Outputs, inputs, whether it has a bias."""


def _attention(model: ModelConfig) -> list[Projection]:
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inward = [(size, model.hidden_size, model.qkv_bias) for size in (queries, keys, keys)]
    return [*inward, (model.hidden_size, queries, model.o_bias)]


def _attention_rest(model: ModelConfig) -> int:
    norms = 0
    if model.qk_norm:
        norms = (model.num_heads + model.num_kv_heads if model.qk_norm_over_heads else 2) * model.head_dim
    return norms + (model.num_heads if model.scoring.sinks else 0)


def _projections(
    name: str, layers: int, projections: list[Projection], rest: int, element_bytes: int, scheme: Scheme | None
) -> Part:
    weights = sum(outputs * inputs for outputs, inputs, _ in projections)
    others = rest + sum(outputs for outputs, _, bias in projections if bias)
    if scheme is None:
        size = weights * element_bytes
    else:
        groups = [-(-inputs // BLOCK) if scheme.weights == "blocks" else 1 for _, inputs, _ in projections]
        scales = sum(outputs * count for (outputs, _, _), count in zip(projections, groups, strict=True))
        size = weights + scales * SCALE_BYTES
    count = layers * (weights + others)
    return Part(name, count, count, layers * (size + others * element_bytes))


def _experts(model: ModelConfig, element_bytes: int) -> list[Part]:
    if (moe := model.moe) is None:
        return []
    hidden, layers = model.hidden_size, len(moe.layers)
    biased = moe.clamped is not None  # gpt-oss
    expert = 3 * hidden * moe.intermediate_size + (2 * moe.intermediate_size + hidden if biased else 0)
    always = moe.num_experts * (hidden + biased)  # the router
    if moe.shared_intermediate_size:
        always += hidden + 3 * hidden * moe.shared_intermediate_size
    chosen = layers * moe.top_k * expert
    counts = {"experts": (layers * moe.num_experts * expert, chosen), "router, shared expert": (layers * always,) * 2}
    return [Part(name, count, active, count * element_bytes) for name, (count, active) in counts.items()]


def _norms(model: ModelConfig, element_bytes: int, stage: Rank) -> Part:
    a_layer = sum(name is not None for name in astuple(model.norms))
    count = (a_layer * model.num_layers + stage.is_last_stage) * model.hidden_size
    return Part("norms", count, count, count * (4 if model.norm_adds_one else element_bytes))


def _vision(config: VisionConfig | TowerConfig | None, element_bytes: int) -> Part:
    """Text is not multiplied with it. Every rank of the first stage has all of it."""
    count = 0
    if isinstance(config, TowerConfig):
        return _tower(config, element_bytes)
    if config is not None:
        size, inner = config.hidden_size, config.intermediate_size
        norm = size if config.gated else 2 * size
        attention = 4 * size * (size + 1)
        feed_forward = (2 if config.gated else 1) * inner * (size + 1) + size * (inner + 1)
        block = size * config.merge**2
        merger = block * (block + 1) + config.out_size * (block + 1)
        patches = size * config.patch_size + (0 if config.gated else size)
        count = config.depth * (attention + feed_forward + 2 * norm) + patches + config.learned_side**2 * size
        count += merger + norm + len(config.deepstack) * (merger + 2 * block)
    return Part("vision encoder", count, 0, count * element_bytes)


def _tower(config: TowerConfig, element_bytes: int) -> Part:
    size, inner, out = config.hidden_size, config.intermediate_size, config.out_size
    norm, joined = size if config.rms else 2 * size, size * config.merge**2
    layer = 4 * size * size + size + 3 * size * config.qkv_bias + 2 * size * config.qk_norm + 2 * norm
    layer += inner * (size + 1) + size * (inner + 1) + (0 if config.means else 2 * size)
    count = config.depth * layer + size * (config.channels * config.patch**2 + 1) + config.patches_of_side**2 * size
    if config.means:
        total = (count + norm + size * out) * element_bytes + 4 * size  # a norm is float32
        return Part("vision encoder", count + norm + size + size * out, 0, total)
    count += 2 * size + 2 * joined + out * (joined + 1) + out * (out + 1)
    return Part("vision encoder", count, 0, count * element_bytes)


def _audio(config: AudioConfig | None, element_bytes: int) -> Part:
    count = 0
    if config is not None:
        size, inner, channels = config.hidden_size, config.intermediate_size, config.channels
        layer = 4 * size * (size + 1) + inner * (size + 1) + size * (inner + 1) + 4 * size
        convolutions = channels * (9 + 1) + 2 * channels * (9 * channels + 1) + size * channels * -(-config.bins // 8)
        count = config.depth * layer + convolutions + 2 * size + size * (size + 1) + config.out_size * (size + 1)
    return Part("audio encoder", count, 0, count * element_bytes)
