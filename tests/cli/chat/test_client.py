"""A chat explains each failure of a server in one sentence."""

import socket
import threading

import pytest
from support.fake_openai import DONE, HEAD, FakeOpenAI, delta, serving, whole_answer
from support.ports import free_port
from treeline.chat.answer import AnswerReader
from treeline.chat.client import LARGEST_BODY, ChatError, Client


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    monkeypatch.delenv("TREELINE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(server: FakeOpenAI, reader: AnswerReader | None = None, model: str = "m") -> str:
    with Client(server.url) as client:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        return "".join(piece.text for piece in client.ask(body, reader or AnswerReader()))


def failure(server: FakeOpenAI) -> str:
    with pytest.raises(ChatError) as caught:
        ask(server)
    assert str(caught.value).isprintable()
    return str(caught.value)


def response(status: str = "200 OK", headers: str = "content-type: text/event-stream\r\n", body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


def test_an_answer_comes_with_the_replica_that_gave_it():
    body = delta(content="hi", finish="stop") + DONE
    reader = AnswerReader()
    head = "content-type: text/event-stream\r\nx-treeline-endpoint: runtime-1\r\n"
    with serving(lambda _: response(headers=head, body=body)) as server:
        assert ask(server, reader) == "hi"
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert reader.answer.replica == "runtime-1"


def test_a_key_is_taken_from_the_environment_treelines_first(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    with serving(lambda _: iter([delta(content="x", finish="stop")])) as server:
        server.key = "theirs"
        assert ask(server) == "x"
        monkeypatch.setenv("TREELINE_API_KEY", "ours")
        assert "the key was refused: look at TREELINE_API_KEY or OPENAI_API_KEY" in failure(server)
        server.key = "ours"
        assert ask(server) == "x"
        assert "authorization: bearer theirs" not in server.heads[-1]


def test_a_key_that_is_missing_is_asked_for():
    with serving() as server:
        server.key = "k"
        assert failure(server).endswith("wants a key (401: no such key): set TREELINE_API_KEY or OPENAI_API_KEY")


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv("TREELINE_API_KEY", "geheim\nx")
    with pytest.raises(ChatError, match="TREELINE_API_KEY holds characters that no key has") as caught:
        Client("http://127.0.0.1:1")
    assert "geheim" not in str(caught.value)


def test_a_refused_connection_is_explained_with_ways_out():
    with (
        pytest.raises(ChatError, match=r"there is no server at .*: start one with `treeline up`"),
        Client(f"http://127.0.0.1:{free_port()}") as client,
    ):
        client.models()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[::1", "http://a b:9x", "//x"])
def test_an_invalid_url_is_reported(url):
    with pytest.raises(ChatError, match="is no URL"):
        Client(url)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_api_path_is_added_to_a_bare_url(path):
    with serving() as server, Client(server.url + path) as client:
        assert client.models() == ["m"]


def test_an_unknown_model_is_answered_with_the_known_ones():
    with serving(lambda _: whole_answer({"error": {"message": "no"}}, 404)) as server:
        server.models = ["a", "b"]
        assert failure(server).endswith("has no model 'm'; it has a, b: name one with --model")
        server.models = ["m"]  # it is there: so that is not it
        assert failure(server).endswith("refused with 404: no")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (whole_answer({"error": {"message": "too\x1b[2J long"}}, 400), "refused with 400: too�[2J long"),
        (response("503 x", "", b"<html>\n<b>down"), "refused with 503: <html> <b>down"),
        (response("500 x", ""), "refused with 500: an empty answer"),
        (response("302 x", "location: http://127.0.0.1:1/\r\n"), "refused with 302"),
        (response("400 x", "", b"x" * (LARGEST_BODY * 2)), "refused with 400: xxx"),
        (response("400 x", "", b"[" * 100_000), "refused with 400: [[["),
        (whole_answer({"choices": []}), "was asked for a stream, but sent something"),
        (response(headers="content-type: text/html\r\n", body=b"<p>"), "for a stream, but sent text/html: <p>"),
        (response(body=delta(content="x")), "the answer broke off"),
        (response(body=b"data: {]\n\n"), "no chunk of a chat completion"),
        (b"SSH-2.0-x\r\n\r\n", "the connection to"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: " + b"x" * 300_000 + b"\r\n\r\n", "the connection to"),
        (HEAD + b"zz\r\n", "the connection to"),
    ],
)  # fmt: skip
def test_a_server_of_another_kind_is_named_in_a_sentence(answer, told):
    with serving(lambda _: answer) as server:
        assert told in failure(server)


def test_a_connection_that_breaks_in_an_answer_keeps_what_came():
    reader = AnswerReader()
    with serving(lambda _: iter([delta(content="half"), None])) as server:
        with pytest.raises(ChatError, match=r"the connection to .* broke"):
            ask(server, reader)
        assert reader.answer.text == "half"


@pytest.mark.parametrize("body", [b"", b"hello", b'{"data": 3}', b'{"data": [{"name": "x"}]}', b"[" * 99_999, b"\xff"])
def test_an_invalid_model_list_reveals_a_server_of_another_kind(body):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(response(headers="", body=body))

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client,
            pytest.raises(ChatError, match="not as an OpenAI-compatible server"),
        ):
            client.models()
        thread.join()
