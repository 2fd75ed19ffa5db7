"""Loads a model from a directory."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import nullcontext

import torch

from treeline_runtime.collectives import Ranks
from treeline_runtime.config import ConfigError, EngineConfig
from treeline_runtime.memory import resolve_context_length
from treeline_runtime.models.config import ModelConfig, ModelError, read_config
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.draft_model import DraftModel, check_draft_model
from treeline_runtime.models.eagle import EagleHead
from treeline_runtime.models.eagle_config import read_eagle
from treeline_runtime.models.moe import Exchange, MoeDecoder
from treeline_runtime.models.pooler import Pooler
from treeline_runtime.models.pooling import Pooling, pooling_of
from treeline_runtime.models.preflight import check_quantization
from treeline_runtime.models.quantization.fp8 import E4M3
from treeline_runtime.models.quantization.product import OLDEST, WEIGHT_SCALES, multiplies_fp8
from treeline_runtime.models.quantization.scheme import ONLINE
from treeline_runtime.models.shards import WHOLE, check_ranks
from treeline_runtime.models.weights import EMBEDDING, HEAD, Checkpoint, RandomWeights, Weights

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        before_ampere = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
        return torch.float16 if before_ampere else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache of a model of `dtype`. Raises ConfigError if the device does not support it."""
    if name == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        raise ConfigError(
            f"kv_cache_dtype {name} needs a GPU from Ada on (compute capability 8.9); "
            f"{torch.cuda.get_device_name(device)} is older: use auto"
        )
    return E4M3


def architecture_of(config: EngineConfig) -> tuple[ModelConfig, Pooling | None]:
    """Reads a checkpoint's architecture and pooling, without weights. Raises ModelError or ConfigError."""
    return read_config(config.model), pooling_of(config.model, config.task, matryoshka=config.matryoshka)


def _decoder(config: ModelConfig) -> type[Decoder]:
    return Decoder if config.moe is None else MoeDecoder


@torch.inference_mode()
def load_model(config: EngineConfig, ranks: Ranks | None = None, exchange: Exchange | None = None) -> Decoder:
    """Builds the model that `config` names, or one rank's part of it, on the rank's own device. exchange: this rank has
    some of the experts, and all of the rest. Raises ModelError or ConfigError."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.index is not None:
        torch.cuda.set_device(device)
    model_config, pooling = architecture_of(config)
    context_length = resolve_context_length(config, model_config)
    check_quantization(config, model_config)
    rank = WHOLE if ranks is None else ranks.rank
    experts = exchange.ranks.rank if exchange is not None else rank if config.ep_size > 1 else WHOLE
    check_ranks(model_config, rank.count, rank.stages, experts.count)
    scheme = model_config.quantization or (ONLINE if config.quantization == "fp8" else None)
    if scheme is not None and device.type == "cuda" and not multiplies_fp8(device):
        logger.warning(
            "fp8 saves nothing here: products of fp8 need a GPU from Ada on (compute capability 8.9) and Triton, so "
            "weights are kept as %s", str(dtype).removeprefix("torch."),
        )  # fmt: skip
    if config.load_format == "dummy":
        random = RandomWeights(config.seed, dtype, device, ONLINE if scheme else None, rank, experts)
        return _with_drafter(config, _build(model_config, random, context_length, pooling, ranks, exchange))
    with Checkpoint(config.model, dtype, device, scheme, rank, experts) as checkpoint:
        model = _build(model_config, checkpoint, context_length, pooling, ranks, exchange)
        checkpoint.check_all_taken()
        if scheme is not None and not (scheme.at_load or checkpoint.has_any(WEIGHT_SCALES)):
            raise ModelError(
                "config.json has a quantization_config, but no tensor has a scale: if the weights are not quantised, "
                "remove the key"
            )
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # so that the reported time of loading is right
    model = _with_drafter(config, model)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # returns the memory that stacking weights has left reserved, for the KV pool
    return model


def _with_drafter(config: EngineConfig, model: Decoder) -> Decoder:
    """The model with the drafter that `config` names. Of several ranks only rank 0 has it: the others get its guesses
    with the steps that verify them."""
    path, ranks = config.speculative_draft_model_path, model.ranks
    if path is None or (ranks is not None and ranks.rank.number):
        return model
    if model.pooler is not None:
        raise ModelError("--speculative-draft-model-path: a model for vectors says nothing that could be guessed")
    dtype, device, target = model.rope[0].dtype, model.rope[0].device, model.config
    if config.speculative_algorithm == "STANDALONE":
        length = model.rope[0].shape[1]
        draft = EngineConfig(model=path, device=str(device), dtype=config.dtype, context_length=length)
        try:
            check_draft_model(path, config.model, target, length)
            model.drafter = DraftModel(load_model(draft))
        except ModelError as error:
            raise ModelError(f"draft model {path}: {error}") from None
        return model

    def whole(name: str) -> torch.Tensor:
        """A matrix of which each rank's model has a part."""
        dummy = config.load_format == "dummy"
        random = nullcontext(RandomWeights(config.seed, dtype, device))
        with random if dummy else Checkpoint(config.model, dtype, device) as weights:
            is_tied = target.tie_word_embeddings and not weights.has(name)
            return weights.take(EMBEDDING if is_tied else name, target.vocab_size, target.hidden_size)

    settings = read_eagle(path, target)
    try:
        with Checkpoint(path, dtype, device) as weights:
            model.drafter = EagleHead(settings, weights, model, whole)
            weights.check_all_taken()
    except ModelError as error:
        raise ModelError(f"EAGLE-3 head {path}: {error}") from None
    model.watched = settings.features
    return model


def _build(
    config: ModelConfig,
    weights: Weights,
    context_length: int,
    pooling: Pooling | None,
    ranks: Ranks | None,
    exchange: Exchange | None,
) -> Decoder:
    """A model for vectors needs no language-model head; the embedding takes its place."""
    pooler = None
    if pooling is not None:
        pooler = Pooler(pooling, weights, config)
        weights.ignore(HEAD)
        config = dataclasses.replace(config, tie_word_embeddings=True)
    model = _decoder(config)(config, weights, context_length, ranks)
    model.pooler = pooler
    if exchange is not None:
        assert isinstance(model, MoeDecoder)
        model.exchange_over(exchange)
    return model
