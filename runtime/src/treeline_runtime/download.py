"""`--model`: a folder, or a Hugging Face repository, which the Hub's library downloads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from treeline_wire.models import HubModel
from treeline_wire.tiny_model import model_folder

SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
FILES = [*SMALL_FILES, "*.safetensors"]
"""Files needed for serving, not the same weights in other formats."""
IGNORED = ["original/*", "consolidated*", "*/*.safetensors"]

logger = logging.getLogger(__name__)


class ModelNotFound(Exception):
    """The model cannot be found, fetched or used; the message says what to do."""


def resolve_model(
    model: str, *, needs_weights: bool = True, check: Callable[[Path], None] = lambda directory: None
) -> Path:
    """A folder with a usable checkpoint; downloads it if `model` is a Hub id. `tiny` is the model that comes along.

    `check` sees the folder before weights are downloaded. Raises ModelNotFound, and what `check` raises.
    """
    folder = model_folder(model)
    if folder.exists() and not folder.is_dir():
        raise ModelNotFound(f"--model: {model} is a file; give the folder that holds config.json")
    if folder.exists():
        _check(folder, model, needs_weights)
        check(folder)
        return folder
    try:
        repo, revision = HubModel.parse(f"hf://{model}")
    except ValueError:
        raise ModelNotFound(
            f"--model: there is no folder {model!r} (and it is not a Hugging Face id, which looks like org/name)"
        ) from None
    folder = _download(repo, revision, SMALL_FILES)
    _check(folder, model, needs_weights=False)
    check(folder)
    folder = _download(repo, revision, FILES)
    _check(folder, model, needs_weights)
    return folder


def repository(model: str) -> str:
    """The model's name elsewhere: the folder, or the Hub id without a revision."""
    return model if Path(model).expanduser().is_dir() else model.partition("@")[0]


def _check(folder: Path, model: str, needs_weights: bool) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelNotFound(f"--model: {model} has no {name}; a checkpoint in Hugging Face's layout is needed")
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"--model: {model} has no *.safetensors weights; other formats are not read")


def _download(repo: str, revision: str | None, files: list[str]) -> Path:
    # imported here: it takes a second, and a local folder does not need it
    from huggingface_hub import snapshot_download

    what = "settings and tokenizer" if files is SMALL_FILES else "weights"
    logger.info("%s: looking for %s on the Hugging Face Hub", repo, what)
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files, ignore_patterns=IGNORED))
    except Exception as error:  # the library lets errors of several HTTP clients through
        raise ModelNotFound(f"--model: {repo} {hub_problem(error, revision)}") from None


def hub_problem(error: BaseException, revision: str | None) -> str:
    """An error of the Hub's library in words, and what helps."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "is gated: accept its terms on the Hub and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "is not on the Hub, or is private: check the name, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"has no revision {revision!r}"
        case errors.LocalEntryNotFoundError():
            return f"is not a folder here, is not downloaded yet, and the Hub cannot be reached: {_first_line(error)}"
    return f"could not be downloaded: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
