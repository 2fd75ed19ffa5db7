"""Hostile or broken servers give an error that says so, without secrets in it."""

from __future__ import annotations

import base64
import json
import socket
from collections import deque
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lang.test_failures import asks, chooses, events, http, said, scripted
from treeline_lang import (
    Anthropic,
    BackendError,
    OpenAI,
    ProgramError,
    RuntimeEndpoint,
    Unreachable,
    background,
    function,
    gen,
    select,
)
from treeline_lang.backends.connections import Connections
from treeline_lang.backends.http import HttpClient
from treeline_wire.sse import EventStream

SECRET = "sk-secret"
NAN = float("nan")


# ---- streams --------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(TEXTS, min_size=1), ENDS, st.integers(1, 7), st.booleans())
def test_events_are_read_however_they_are_cut(texts: list[str], end: str, size: int, mark: bool) -> None:
    """Lines end where the format says, and nowhere else; characters may be cut in two."""
    shown = [json.dumps({"text": text}, ensure_ascii=False, indent=1) for text in texts]
    told = "".join(
        end.join([": a comment", "id: 7", f"event: e{number}", *(f"data: {line}" for line in one.split("\n")), "", ""])
        for number, one in enumerate(shown)
    )
    data = b"\xef\xbb\xbf" * mark + told.encode()
    stream = EventStream(1 << 20)
    found = [event for at in range(0, len(data), size) for event in stream.take(data[at : at + size])]
    assert found + stream.end() == shown


def test_a_text_may_contain_other_line_ends() -> None:
    body = json.dumps(said("a\u2028b\x85c"), ensure_ascii=False).encode()
    with scripted(lambda *_: events(body)) as url, RuntimeEndpoint(url) as backend:
        assert asks.run(backend=backend, stream=True)["a"] == "a\u2028b\x85c"


def test_an_event_that_never_ends_is_given_up() -> None:
    for pieces in ([b"data: x"] + [b"x" * 100] * 20, [b"data: xxxxxxxxxxxxxxxx\n"] * 100):
        stream = EventStream(1000)
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            deque(map(stream.take, pieces))


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_nested_beyond_all_bounds_is_no_json(stream: bool) -> None:
    deep = b"[" * 100_000
    answer = events(deep) if stream else http("200 OK", deep)
    with (
        scripted(lambda *_: answer) as url,
        RuntimeEndpoint(url) as backend,
        pytest.raises(BackendError, match="not JSON"),
    ):
        _ = asks.run(backend=backend, stream=stream)["a"]


def test_a_redirect_is_not_followed_with_the_key() -> None:
    with (
        scripted(lambda *_: http("302 Found", b"", "location: http://127.0.0.1:1/x")) as url,
        RuntimeEndpoint(url, api_key=SECRET) as backend,
        pytest.raises(BackendError, match="answered 302"),
    ):
        _ = asks.run(backend=backend)["a"]


def scoring(entries: Any, count: int = 2, prompt_tokens: Any = 3) -> Any:
    def script(_path: str, body: dict[str, Any], _number: int) -> bytes:
        meta = {"input_token_logprobs": entries} if "return_logprob" in body else {"prompt_tokens": prompt_tokens}
        one = {"text": "", "meta_info": meta}
        return http("200 OK", json.dumps([one] * count if "return_logprob" in body else one).encode())

    return script


@pytest.mark.parametrize("method", ["greedy_token_selection", "unconditional_likelihood_normalized"])
@pytest.mark.parametrize(
    "entry", [[NAN, 1, "y"], ["x", 1, "y"], [True, 1, "y"], [7.0, 1, "y"], [-1, "1", "y"], [-1, 1, 5]]
)
def test_an_invalid_logprob_is_an_error(entry: list[Any], method: str) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + select("a", ["y", "z"], choices_method=method)

    with (
        scripted(scoring([entry])) as url,
        RuntimeEndpoint(url) as backend,
        pytest.raises(BackendError, match="gave an invalid logprob"),
    ):
        _ = program.run(backend=backend)["a"]


def test_impossible_choices_are_compared() -> None:
    with scripted(scoring([[float("-inf"), 1, "y"]])) as url, RuntimeEndpoint(url) as backend:
        state = chooses.run(backend=backend)
        assert state["a"] == "y"
        assert state.get_meta_info("a")["scores"] == {"y": -9999.0, "z": -9999.0}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (scoring([[-1, 1, "y"]], count=3), "logprobs of 3 texts where 2"),
        (scoring([], prompt_tokens=float("inf")), "not one of /generate"),
    ],
)
def test_scores_of_other_texts_are_an_error_of_the_server(script: Any, reason: str) -> None:
    with scripted(script) as url, RuntimeEndpoint(url) as backend, pytest.raises(BackendError, match=reason):
        _ = chooses.run(backend=backend)["a"]


@pytest.mark.parametrize("told", [[5], [[1, 2]], [[1, 2, 3]], "xyz", 5])
def test_invalid_tokens_are_not_used_for_speculation(told: Any) -> None:
    @function(num_api_spec_tokens=8)
    def program(s: Any) -> None:
        s += "x" + gen("a", stop="q", max_tokens=2)

    answer = said("hi")
    answer["meta_info"]["output_token_logprobs"] = told
    with scripted(lambda *_: http("200 OK", json.dumps(answer).encode())) as url, RuntimeEndpoint(url) as backend:
        state = program.run(backend=backend)
        assert (state["a"], state.get_meta_info("a")["calls"]) == ("hi", 2)


# ---- keys, URLs, proxies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\nx: y", "\0", "…", " "])
@pytest.mark.parametrize("backend", [RuntimeEndpoint, OpenAI, Anthropic])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(backend: Any, end: str) -> None:
    with pytest.raises(ValueError, match="one line of visible ASCII") as caught:
        backend(url="http://127.0.0.1:1", model="m", api_key=SECRET + end)
    assert SECRET not in str(caught.value)


def test_a_password_in_a_url_is_sent_and_not_shown() -> None:
    with socket.socket() as silent:  # bound and not listening: nothing answers there
        silent.bind(("127.0.0.1", 0))
        client = HttpClient(f"http://user:{SECRET}@127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unreachable) as caught:
            background.call(client.get("/x"))
        background.call(client.close())
    assert SECRET not in str(caught.value)
    assert base64.b64decode(client._headers["authorization"].removeprefix("Basic ")) == f"user:{SECRET}".encode()
    for wrong in (
        f"ftp://u:{SECRET}@h",
        f"http://u:{SECRET}@h:99999",
        f"http://u:{SECRET}@",
        f"http://u:{SECRET}@[::1",
    ):
        with pytest.raises(ValueError, match=r"URL") as refused:
            HttpClient(wrong)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("timeout_s", [0, -1, NAN])
def test_a_timeout_must_be_a_positive_time(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="above 0 seconds"):
        RuntimeEndpoint("http://127.0.0.1:1", timeout_s=timeout_s)


def test_proxies_of_the_environment_may_leave_their_scheme_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "proxy.invalid:3128")
    assert Connections("http://example.invalid", {}, 1.0)._proxy == urlsplit("http://proxy.invalid:3128")
    monkeypatch.setenv("http_proxy", "smoke://u:sk-secret@proxy.invalid")
    client = HttpClient("http://example.invalid")
    client._open()._slots._value = 1
    for _ in range(3):  # a request that gets no connection takes none
        with pytest.raises(ProgramError, match="proxy cannot be used") as caught:
            background.call(client.get("/x"))
        assert SECRET not in str(caught.value)
    background.call(client.close())
