"""Every string that the API accepts stays one word of a command line, one path, one value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from treeline_operator.api.engine import Adapter
from treeline_operator.api.model import ModelSpec
from treeline_operator.api.parts import SERVED_NAME_PATTERN
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import _PART, ModelSource
from treeline_operator.plan.download import files
from treeline_operator.plan.engines import engine_of
from treeline_operator.world import Images
from treeline_runtime.args import parse_args
from treeline_runtime.fetch.__main__ import parse

NAMES = st.from_regex(re.compile(SERVED_NAME_PATTERN, re.ASCII), fullmatch=True).filter(lambda n: len(n) <= 256)
PARTS = st.from_regex(re.compile(_PART, re.ASCII), fullmatch=True).filter(lambda p: p != "..")
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: "/".join(parts))
REPOSITORIES = st.tuples(*[st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_]|[.-](?![.-])){0,8}", fullmatch=True)] * 2).map(
    "/".join
)
REVISIONS = st.lists(
    st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_]|[.-](?![.-])){0,8}", fullmatch=True), min_size=1, max_size=3
).map("/".join)
URIS = st.one_of(
    st.tuples(REPOSITORIES, REVISIONS).map("hf://{0[0]}@{0[1]}".format),
    REPOSITORIES.map("hf://{}".format),
    PATHS.map("pvc://weights/{}".format),
    PATHS.map("path:///{}".format),
)
WORDS = st.from_regex(re.compile(r"[a-z0-9][a-z0-9_-]*", re.ASCII), fullmatch=True).filter(lambda w: len(w) <= 32)


def pool(engine: str, **spec: Any) -> InferencePool:
    model = {"uri": "hf://org/name", **spec.pop("model", {})}
    body = {"model": model, "engine": {"type": engine, "image": "i", **spec}}
    meta = {"name": "p", "uid": "u"}
    return InferencePool.from_object(
        {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": body}
    )


def command_line(made: InferencePool) -> tuple[str, ...]:
    return engine_of(made).launch(made, files(made), Images()).args


def flags(words: tuple[str, ...]) -> list[str]:
    """Return the flags of a command line, without their values."""
    return [word.split("=", 1)[0] for word in words if word.startswith("-")]


@settings(deadline=None, max_examples=60)
@given(uri=URIS, name=NAMES, policy=WORDS)
def test_our_runtime_and_the_download_read_back_every_text(uri: str, name: str, policy: str) -> None:
    made = pool("treeline", model={"uri": uri, "name": name}, schedulePolicy=policy)
    found = files(made)
    words = [word for word in command_line(made) if not word.startswith("--schedule-policy=")]
    read = parse_args(words)
    assert (read.served_model_name, read.model) == (name, found.model)
    assert f"--schedule-policy={policy}" in command_line(made)
    fetched = parse(found.fetches)
    wanted = [uri] if uri.startswith("hf://") else []
    assert (fetched.uri, fetched.to) == (wanted, [found.model] if wanted else [])


@settings(deadline=None, max_examples=60)
@given(
    engine=st.sampled_from(["sglang", "vllm"]),
    uri=URIS,
    tokenizer=URIS,
    name=NAMES,
    adapter=st.tuples(NAMES, URIS),
    word=WORDS,
)
def test_no_string_becomes_a_flag_two_words_or_a_variable(
    engine: str, uri: str, tokenizer: str, name: str, adapter: tuple[str, str], word: str
) -> None:
    harmless = {"model": {"uri": "path:///m", "name": "n", "tokenizer": "path:///t"}}
    plain = pool(engine, **harmless, adapters=[{"name": "a", "uri": "path:///a"}], dtype="auto", schedulePolicy="fcfs")
    if adapter[0] == name:
        return
    made = pool(
        engine,
        model={"uri": uri, "name": name, "tokenizer": tokenizer},
        adapters=[{"name": adapter[0], "uri": adapter[1]}],
        dtype="auto",
        schedulePolicy=word,
    )
    words = command_line(made)
    assert flags(words) == flags(command_line(plain)), "the same flags for any values"
    assert len(words) == len(command_line(plain))
    found = files(made)
    (named,) = [word for word in words if word.startswith(f"{adapter[0]}=")]
    assert named.split("=", 1)[1] == found.adapters[adapter[0]], "an adapter is split at its first ="
    for text in (*words, *found.fetches, *(mount["mountPath"] for mount in found.mounts)):
        assert "$(" not in text.replace("$(SGLANG_ADMIN_API_KEY)", ""), "that one variable is meant"
        assert text.isprintable()
        assert " " not in text
    for path in (found.model, found.tokenizer, *found.adapters.values()):
        assert path is not None
        assert path.startswith("/")
        assert ".." not in path.split("/")


@settings(max_examples=300)
@given(first=REPOSITORIES, second=REPOSITORIES, revisions=st.tuples(st.none() | REVISIONS, st.none() | REVISIONS))
def test_two_repositories_or_revisions_are_never_downloaded_into_one_folder(
    first: str, second: str, revisions: tuple[str | None, str | None]
) -> None:
    uris = [
        f"hf://{name}" + (f"@{revision}" if revision else "")
        for name, revision in zip((first, second), revisions, strict=True)
    ]
    folders = [files(pool("treeline", model={"uri": uri})).model for uri in uris]
    assert (folders[0] == folders[1]) == (uris[0] == uris[1])


HOSTILE = st.text(min_size=1, max_size=40) | st.sampled_from(
    [
        "--trust-remote-code",
        "-",
        "a b",
        "a\n",
        "\n",
        "a\tb",
        "$(HF_TOKEN)",
        "a\0",
        "a=/etc",
        "\u00a0",
        "a\u2028b",
        "é",
    ]
)


def strings(text: str) -> Iterator[str]:
    """Yield the fields that accept the text unchanged."""
    for where, model in {
        "model.name": lambda: ModelSource.model_validate({"uri": "hf://o/n", "name": text}),
        "adapter.name": lambda: Adapter.model_validate({"name": text, "uri": "hf://o/n"}),
        "modelName": lambda: ModelSpec.model_validate({"modelName": text, "poolRef": {"name": "p"}}),
        "pvc": lambda: ModelSource.model_validate({"uri": f"pvc://claim/{text}"}),
        "path": lambda: ModelSource.model_validate({"uri": f"path:///{text}"}),
        "hf": lambda: ModelSource.model_validate({"uri": f"hf://o/n@{text}"}),
        "builtin": lambda: ModelSource.model_validate({"uri": f"builtin://{text}"}),
    }.items():
        try:
            model()
        except ValidationError:
            continue
        yield where


@settings(max_examples=500)
@given(text=HOSTILE)
def test_every_accepted_text_is_printable_ascii_without_blanks_and_no_flag(text: str) -> None:
    taken = list(strings(text))
    if taken:
        assert re.fullmatch(r"[!-~]+", text), taken
        assert not text.startswith("-"), taken
        assert not set(text) & set("$`'\"\\;|&<>(){}*?!#"), taken


@pytest.mark.parametrize("text", ["--trust-remote-code", "a b", "a\n", "\n", "$(HF_TOKEN)", "a\0", "\u00a0"])
def test_ambiguous_texts_are_refused_everywhere(text: str) -> None:
    assert list(strings(text)) == []


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_foreign_engines_get_flags_that_hide_hits_in_a_shared_cache(engine: str) -> None:
    def tells(**gateway: Any) -> bool:
        body = {"model": {"uri": "path:///m"}, "engine": {"type": engine}, "gateway": gateway}
        made = InferencePool.from_object(
            {
                "apiVersion": "treeline.dev/v1alpha1",
                "kind": "InferencePool",
                "metadata": {"name": "p"},
                "spec": body,
            }
        )
        flag = {"sglang": "--enable-cache-report", "vllm": "--enable-prompt-tokens-details"}[engine]
        return flag in command_line(made)

    keyed = {"apiKeysSecretRef": {"name": "keys"}}
    assert tells()
    assert tells(standalone=keyed), "each client sees its own hits alone"
    assert not tells(standalone=keyed, isolation="Shared")
    assert tells(standalone={**keyed, "exposeRouting": True}, isolation="Shared")
    assert tells(isolation="Shared"), "without keys there are no strangers"
