"""Checkpoints of embedding models, as transformers and sentence-transformers save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.runtime_models import reference, save
from support.runtime_server import make_checkpoint, make_tokenizer

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}


def add_modules(path: Path, pooling: dict[str, Any], *, normalize: bool = True) -> Path:
    """Add sentence-transformers' files to a decoder: modules.json, and the configuration of its pooling."""
    listed = [TRANSFORMER, {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    if normalize:
        listed.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def add_logit_score(path: Path, yes: int, no: int | None) -> Path:
    """Add the files that make a language model a reranker."""
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    listed = [TRANSFORMER, {"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind}]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_LogitScore").mkdir(exist_ok=True)
    (path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
    return path


def embedder(
    path: Path, pooling: str = "lasttoken", *, normalize: bool = True, family: str = "Qwen3", kind: str = "Model"
) -> tuple[Any, Path]:
    """Save a random embedding model. Return transformers' model, and its folder."""
    theirs = reference(family, {"head_dim": 16} if family == "Qwen3" else {}, kind)
    return theirs, add_modules(save(theirs, path), {"pooling_mode": pooling}, normalize=normalize)


def classifier(path: Path, labels: int, family: str = "Qwen3", **changes: Any) -> tuple[Any, Path]:
    """Save a random *ForSequenceClassification. Return transformers' model, and its folder."""
    sizes = ({"head_dim": 16} if family == "Qwen3" else {}) | {"num_labels": labels, "pad_token_id": 0}
    theirs = reference(family, sizes | changes, "ForSequenceClassification")
    return theirs, save(theirs, path)


RERANK_TEMPLATE = (
    "<|im_start|>system\n"
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% else %}Is it relevant?{% endfor %}"
    "<|im_end|>\n{% for m in messages if m.role == 'query' %}Query: {{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role == 'document' %}Document: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_tokenizer(path: Path, *, template: str | None = None) -> Path:
    """Add the tokenizer of `make_tokenizer`, with another chat template."""
    make_tokenizer(path)
    if template is not None:
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return path


def configured(path: Path, architecture: str, **config: Any) -> Path:
    """Write a checkpoint for the fake scheduler: its weights are never read."""
    make_checkpoint(path)
    made = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(made | {"architectures": [architecture]} | config))
    return path
