"""Reads a checkpoint's purpose: text, or vectors of its hidden states, and how to make them. No torch here.

Two sources: the architecture in config.json (Qwen3ForCausalLM, Qwen3Model, Qwen3ForSequenceClassification), and
sentence-transformers' modules.json: `Pooling` and `Normalize` make an embedding model of a decoder, `LogitScore` a
reranker of a language model (the log-odds of two next tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from treeline_runtime.models.config import BASE, CAUSAL, CLASSIFIER, MULTIMODAL, ModelError
from treeline_runtime.models.settings import read_json, read_object

PoolingTask = Literal["embed", "score", "reward"]
Task = Literal["generate"] | PoolingTask
"""A server's task. `embed`: texts to vectors. `score`: the relevance of a document to a query. `reward`: the outputs of
a classification head, one per label."""
AskedTask = Literal["auto"] | Task
Method = Literal["last", "mean"]
Activation = Literal["sigmoid", "softmax", "identity"]

MODULES = "modules.json"
_MODULE_KINDS = ("Transformer", "Pooling", "Normalize", "LogitScore")
_CHAINS = (
    ("Transformer",),
    ("Transformer", "Pooling"),
    ("Transformer", "Pooling", "Normalize"),
    ("Transformer", "LogitScore"),
)
_TRANSFORMER, _PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
_METHODS: Mapping[str, Method] = {"lasttoken": "last", "mean": "mean"}
_OLD_METHODS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of sentence-transformers before 5.4 → today's `pooling_mode`."""
MOST_LABELS = 1 << 20
"""The most labels: each has a name here, and a larger number is a mistake that would take all memory."""
_ACTIVATIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}


@dataclass(frozen=True)
class Pooling:
    """The way from a text's hidden states to its vector."""

    task: PoolingTask
    method: Method = "last"
    normalize: bool = False
    """Scale to length 1."""
    labels: tuple[str, ...] = ()
    """The names of a classification head's outputs; () = no head."""
    answers: tuple[int, ...] = ()
    """Rows of the language-model head: the token for yes and, if there is one, for no."""
    activation: Activation = "identity"
    """Makes probabilities of outputs."""
    pad: int | None = None
    """A classification head skips this token at a text's end; None = no such token."""
    hidden_size: int = 0
    shorter: tuple[int, ...] | None = ()
    """Other dimensions to which vectors may be shortened (Matryoshka representations); None = any."""

    @property
    def size(self) -> int:
        return len(self.labels) or (1 if self.answers else self.hidden_size)

    def trimmed(self, ids: list[int]) -> list[int]:
        """The text without padding at its end. transformers does the same, even if the token has a meaning, such as the
        end of a turn; if there is only padding, the first token stays."""
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad:
            end -= 1
        return ids[:end]

    @property
    def needs_all(self) -> bool:
        """Whether every position's hidden state is needed, so that no cached prefix can be used."""
        return self.method == "mean"


def pooling_of(directory: str | Path, asked: AskedTask = "auto", *, matryoshka: bool = False) -> Pooling | None:
    """Reads how the checkpoint's hidden states become vectors; None if it generates text.

    `matryoshka`: vectors may be shortened even if config.json does not allow it. Raises ModelError if the checkpoint
    cannot do `asked`, or does it in an unknown way.
    """
    try:
        return _pooling_of(Path(directory), asked, matryoshka=matryoshka)
    except (TypeError, OverflowError) as error:
        raise ModelError(
            f"{directory}: config.json, or a file beside it that says how vectors are made: {error}"
        ) from error


def _pooling_of(directory: Path, asked: AskedTask, *, matryoshka: bool) -> Pooling | None:
    """The same. Raises ModelError, or TypeError or OverflowError for values of wrong types."""
    config = read_object(directory / "config.json")
    names = [str(name) for name in config.get("architectures") or ()]
    if asked == "generate":
        if names and not any(name.endswith((CAUSAL, MULTIMODAL)) for name in names):
            raise ModelError(f"task generate: {', '.join(names)} has no language-model head; *{CAUSAL} has one")
        return None
    modules = _modules(directory)
    shorter = None if matryoshka else _shorter(config)
    found: Pooling | None = None
    if any(name.endswith(CLASSIFIER) for name in names):
        found = _classifier(config, asked)
    elif "LogitScore" in modules:
        found = Pooling("score", answers=_answers(modules["LogitScore"]), activation="sigmoid")
    elif asked == "embed" or "Pooling" in modules or any(name.endswith(BASE) for name in names):
        found = _embedder(directory, modules, shorter)
    if asked not in ("auto", None if found is None else found.task):
        raise ModelError(_cannot(asked, found))
    hidden_size = config.get("hidden_size")
    return None if found is None else replace(found, hidden_size=hidden_size if isinstance(hidden_size, int) else 0)


def _cannot(asked: str, found: Pooling | None) -> str:
    is_for = "generate" if found is None else found.task
    needed = {
        "embed": "a decoder without a head of its own, or with the Pooling module of sentence-transformers",
        "score": f"a *{CLASSIFIER} with one label, or a {MODULES} with a LogitScore module (1_LogitScore/config.json "
        "names the tokens for yes and no)",
        "reward": f"a *{CLASSIFIER}",
    }
    return f"task {asked}: this checkpoint is made for {is_for}; {asked} needs {needed[asked]}"


# ---- classification heads ---------------------------------------------------------------------------------------


def _classifier(config: Mapping[str, Any], asked: AskedTask) -> Pooling:
    labels = _labels(config)
    single = len(labels) == 1
    task: PoolingTask = "reward" if asked == "reward" or not single else "score"
    pad = config.get("pad_token_id")
    return Pooling(
        task,
        labels=labels,
        activation=_activation(config, single=single),
        pad=pad if isinstance(pad, int) else None,
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names the labels as transformers does: from id2label, else num_labels of them, else two."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        try:
            by_number = {int(number): str(name) for number, name in named.items()}
            return tuple(by_number[number] for number in range(len(by_number)))
        except (KeyError, ValueError):
            raise ModelError("config.json: id2label must name labels 0, 1, 2 …") from None
    count = config.get("num_labels", 2)
    if type(count) is not int or not 1 <= count <= MOST_LABELS:
        raise ModelError(f"config.json: num_labels must be a number from 1 to {MOST_LABELS}, not {count!r}")
    return tuple(f"LABEL_{number}" for number in range(count))


def _activation(config: Mapping[str, Any], *, single: bool) -> Activation:
    """sentence-transformers' activation, else the one for the kind of problem."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        short = str(named).rpartition(".")[2]
        if short not in _ACTIVATIONS:
            raise ModelError(f"config.json: activation {named} is not supported; {' and '.join(_ACTIVATIONS)} are")
        return _ACTIVATIONS[short]
    if config.get("problem_type") == "regression":
        return "identity"
    return "sigmoid" if single or config.get("problem_type") == "multi_label_classification" else "softmax"


# ---- sentence-transformers --------------------------------------------------------------------------------------


def _modules(directory: Path) -> dict[str, Path]:
    """Kind → folder, in order; {} without modules.json. Raises ModelError for unknown modules."""
    path = directory / MODULES
    if not path.is_file():
        return {}
    listed = read_json(path)
    found: dict[str, Path] = {}
    for module in listed if isinstance(listed, list) else [None]:
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or not _is_inside(folder):
            raise ModelError(f"{path} is not a list of modules with a type and a path each")
        short = kind.rpartition(".")[2]
        if short not in _MODULE_KINDS or short in found:
            raise ModelError(
                f"{MODULES} has a module {kind} that is not supported; supported are a Transformer, then Pooling and "
                "perhaps Normalize, or LogitScore"
            )
        if short == "Transformer" and folder:
            raise ModelError(f"{MODULES}: the Transformer must be in the checkpoint's own folder, not in {folder!r}")
        found[short] = directory / folder
    if tuple(found) not in _CHAINS:
        raise ModelError(f"{MODULES} has {', then '.join(found) or 'nothing'}: that is not supported")
    if _read_optional(directory / _TRANSFORMER).get("do_lower_case"):
        raise ModelError(f"{_TRANSFORMER} has do_lower_case, which is not supported: have clients send lower case")
    return found


def _is_inside(folder: str) -> bool:
    return not Path(folder).is_absolute() and ".." not in Path(folder).parts


def _embedder(directory: Path, modules: Mapping[str, Path], shorter: tuple[int, ...] | None) -> Pooling:
    """Without modules: the last token's hidden state, normalised, as in vLLM."""
    if "Pooling" not in modules:
        return Pooling("embed", "last", normalize=True, shorter=shorter)
    name = _read_optional(directory / _PROMPTS).get("default_prompt_name")
    if name is not None:
        raise ModelError(
            f"{_PROMPTS} has default_prompt_name {name!r}: prompts are not put before inputs here; make it null, and "
            "have clients send the prompt as part of their input"
        )
    return Pooling(
        "embed", _method(modules["Pooling"] / "config.json"), normalize="Normalize" in modules, shorter=shorter
    )


def _method(path: Path) -> Method:
    config = read_object(path)
    mode = config.get("pooling_mode") or [new for old, new in _OLD_METHODS.items() if config.get(old)]
    modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or modes[0] not in _METHODS:
        shown = ", ".join(map(str, modes)) or "none"
        raise ModelError(f"{path}: pooling by {shown} is not supported; {' and '.join(_METHODS)} are")
    return _METHODS[modes[0]]


def _answers(folder: Path) -> tuple[int, ...]:
    config = read_object(folder / "config.json")
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    tokens: tuple[Any, ...] = (yes,) if no is None else (yes, no)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ModelError(f"{folder / 'config.json'}: true_token_id and false_token_id must be token ids")
    return tokens


def _shorter(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """vLLM's keys for supported dimensions."""
    listed = config.get("matryoshka_dimensions")
    if listed is not None:
        if not isinstance(listed, list) or not all(type(size) is int and size > 0 for size in listed):
            raise ModelError("config.json: matryoshka_dimensions must be a list of sizes")
        return tuple(listed)
    return None if config.get("is_matryoshka") is True else ()


def _read_optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
