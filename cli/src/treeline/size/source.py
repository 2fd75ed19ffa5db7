"""A model's config.json, from a folder or from the Hugging Face Hub.

From the Hub nothing else is fetched but the index of the weights.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from treeline_runtime.download import ModelNotFound, hub_problem
from treeline_runtime.models import ModelConfig, ModelError, read_config
from treeline_runtime.models.settings import read_object
from treeline_wire.models import HubModel
from treeline_wire.tiny_model import model_folder

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    model: ModelConfig
    stored_bytes: int | None
    """Bytes of the weights in their files, if an index or the files say so."""


def read_source(name: str) -> Source:
    """name: a folder, `org/name[@revision]`, or tiny. Raises ModelNotFound, ModelError."""
    folder = model_folder(name)
    if folder.is_file() and folder.name == "config.json":
        folder = folder.parent
    if folder.is_dir():
        return _read(folder)
    try:
        repo, revision = HubModel.parse(f"hf://{name}")
    except ValueError:
        raise ModelNotFound(
            f"there is no folder {name!r}, and it is no Hugging Face id, which looks like org/name"
        ) from None
    with tempfile.TemporaryDirectory(prefix="treeline-size-") as fetched:
        _fetch(repo, revision, Path(fetched))
        return _read(Path(fetched))


def _fetch(repo: str, revision: str | None, to: Path) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        hf_hub_download(repo, "config.json", revision=revision, local_dir=to)
        with contextlib.suppress(RemoteEntryNotFoundError):  # one file of weights has no index
            hf_hub_download(repo, INDEX, revision=revision, local_dir=to)
    except RemoteEntryNotFoundError:
        raise ModelNotFound(f"{repo} has no config.json: it is no model in Hugging Face's layout") from None
    except Exception as error:  # the library lets errors of several HTTP clients through
        raise ModelNotFound(f"{repo} {hub_problem(error, revision)}") from None


def _read(folder: Path) -> Source:
    model = read_config(folder)
    if (folder / INDEX).is_file():
        metadata = read_object(folder / INDEX).get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        if size is not None and (type(size) is not int or size < 0):
            raise ModelError(f"{folder / INDEX}: total_size is no number of bytes: {size!r}")
        return Source(model, size)
    files = list(folder.glob("*.safetensors"))
    return Source(model, sum(file.stat().st_size for file in files) if files else None)
