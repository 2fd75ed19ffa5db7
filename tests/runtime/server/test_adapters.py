"""Adapters by HTTP: loaded, listed, selected by name, unloaded; who may do it and from where."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import zmq
from support.adapters import write_adapter
from support.runtime_server import ServerProcess, Stream, eventually, running
from treeline_runtime import messages
from treeline_runtime.fetch.adapters import Engine
from treeline_runtime.models.adapters import WEIGHTS
from treeline_runtime.published import LoadUpdate
from treeline_runtime.server import administration
from treeline_runtime.server.metrics import Metrics
from treeline_wire import frames
from treeline_wire.events import BlockStored, decode_batch
from treeline_wire.live_adapters import version_name
from treeline_wire.load import TREELINE_LOAD_TOPIC, decode_load

pytestmark = pytest.mark.integration

PROMPT = "The quick brown fox jumps over the lazy dog. one two three four five"
Q, DOWN = "self_attn.q_proj", "mlp.down_proj"


def adapter(folder: Path, seed: int, **options: Any) -> Path:
    """Write one for the model of `support.runtime_server`."""
    shapes = {f"layers.{i}.{name}": size for i in range(2) for name, size in ((Q, (32, 32)), (DOWN, (32, 64)))}
    return write_adapter(folder, shapes, seed=seed, size=0.8, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "code", "start")):
        adapter(folder / "below" / name, seed)
    adapter(folder / "beside", 9)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, root: Path) -> Iterator[ServerProcess]:
    flags = ("--max-total-tokens=4096", "--max-loras=2", f"--lora-root={root / 'below'}")
    modules = ("--lora-modules", f"start={root / 'below/start'}")
    with running(model, *flags, *modules) as server:
        yield server


@pytest.fixture
def loaded(admin: httpx.Client) -> Iterator[None]:
    """Two adapters besides the one from the start."""
    for name in ("sql", "code"):
        post(admin, "load", name, lora_path=name)
    yield
    for name in ("sql", "code"):
        post(admin, "unload", name)


def post(admin: httpx.Client, what: str, name: str, status: int = 200, **body: Any) -> Any:
    answer = admin.post(f"/v1/{what}_lora_adapter", json={"lora_name": name, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def complete(http: httpx.Client, status: int = 200, **body: Any) -> Any:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **body}
    answer = http.post("/v1/completions", json=asked)
    assert answer.status_code == status, answer.text
    return answer.json()


def text(http: httpx.Client, **body: Any) -> str:
    return str(complete(http, **body)["choices"][0]["text"])


@pytest.mark.usefixtures("loaded")
def test_a_name_selects_an_adapter_in_every_api(http: httpx.Client, model: Path) -> None:
    texts = {text(http, model=name) for name in (model.name, "start", "sql", "code")}
    assert len(texts) == 4, "each has an answer of its own"
    assert text(http) == text(http, model=model.name)
    expected = text(http, model="sql")
    assert text(http, model=f"{model.name}:sql") == expected
    assert text(http, model=model.name, lora_path="sql") == expected
    generate = {"text": PROMPT, "lora_path": "sql", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    assert http.post("/generate", json=generate).json()["text"] == expected
    chat = {"messages": [{"role": "user", "content": "hello"}], "model": "sql", "max_tokens": 4}
    for path, key in (("/v1/chat/completions", "choices"), ("/v1/messages", "content")):
        answer = http.post(path, json=chat).json()
        assert answer["model"] == "sql", answer
        assert answer[key]
    answer = http.post("/v1/responses", json={"input": "hello", "model": "sql", "max_output_tokens": 4}).json()
    assert answer["model"] == "sql"
    long = {**chat, "messages": [{"role": "user", "content": "one two " * 300}]}  # read by another process
    assert http.post("/v1/chat/completions", json=long | {"padding": None}).json()["model"] == "sql"
    tokens = http.post("/tokenize", json={"prompt": "hello", "model": "sql"})
    assert tokens.status_code == 200, tokens.text


@pytest.mark.usefixtures("loaded")
def test_the_list_of_models_has_adapters_with_their_parent(http: httpx.Client, model: Path) -> None:
    listed = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert set(listed) == {model.name, "start", "sql", "code"}
    assert listed[model.name]["parent"] is None
    assert "digest" not in listed[model.name]
    assert {entry["parent"] for name, entry in listed.items() if name != model.name} == {model.name}
    assert len({entry.get("digest") for entry in listed.values()}) == 4
    assert http.get("/v1/models/sql").json() == listed["sql"]
    assert http.get("/v1/models/none").status_code == 404


@pytest.mark.usefixtures("loaded")
def test_clients_and_adapters_share_no_pages_and_events_name_the_adapter(
    server: ServerProcess, http: httpx.Client
) -> None:
    def cached(**body: Any) -> int:
        return int(
            complete(http, prompt=PROMPT + " a new beginning", **body)["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
        )

    with zmq.Context() as context, context.socket(zmq.SUB) as events, context.socket(zmq.SUB) as loads:
        about = http.get("/server_info").json()["kv_events"]
        events.connect(f"tcp://127.0.0.1:{about['endpoint_port_base']}")
        events.subscribe(b"")
        loads.connect(f"tcp://127.0.0.1:{about['load_endpoint_port_base']}")
        loads.subscribe(TREELINE_LOAD_TOPIC)
        assert loads.poll(60_000)  # the publisher has taken the subscription
        report = decode_load(TREELINE_LOAD_TOPIC, frames.parse_live(loads.recv_multipart())[2])
        assert report.adapters == ["code", "sql", "start"]
        assert [cached(), cached(model="sql"), cached(model="code")] == [0, 0, 0]
        assert min(cached(), cached(model="sql"), cached(model="code")) > 0
        names: set[str | None] = set()
        while len(names) < 3 and events.poll(60_000):
            batch = decode_batch(frames.parse_live(events.recv_multipart())[2])
            names |= {event.lora_name for event in batch.events if isinstance(event, BlockStored)}
    assert names == {None, "sql", "code"}


def test_a_reload_under_the_same_name_answers_with_the_new_weights(
    http: httpx.Client, admin: httpx.Client, root: Path
) -> None:
    answers = []
    for seed in (5, 6, 5):
        adapter(root / "below/changing", seed)
        post(admin, "load", "changing", lora_path=str(root / "below/changing"))
        answers.append(text(http, model="changing"))
        post(admin, "unload", "changing")
        complete(http, 404, model="changing")
    assert answers[0] == answers[2] != answers[1]


def test_sglangs_paths_do_the_same(admin: httpx.Client) -> None:
    answer = admin.post("/load_lora_adapter", json={"lora_name": "sql", "lora_path": "sql"}).json()
    assert answer["success"] is True
    assert set(answer["loaded_adapters"]) == {"start", "sql"}
    assert set(admin.post("/unload_lora_adapter", json={"lora_name": "sql"}).json()["loaded_adapters"]) == {"start"}


def test_unloading_waits_for_running_requests_and_refuses_new_ones(
    server: ServerProcess, http: httpx.Client, admin: httpx.Client
) -> None:
    post(admin, "load", "sql", lora_path="sql")
    stream = Stream(server, 600, model="sql", ignore_eos=True, temperature=0)
    assert stream.began.wait(60)
    unloading = threading.Thread(target=post, args=(admin, "unload", "sql"))
    unloading.start()

    def refused() -> str:
        answer = http.post("/v1/completions", json={"prompt": "x", "model": "sql", "max_tokens": 1})
        return str(answer.json()["error"]["message"]) if answer.status_code == 404 else ""

    assert "`sql`" in eventually(refused)
    unloading.join(60)
    stream.join(60)
    assert stream.events[-1] == "[DONE]", "it was not cut off"
    assert sum('"text"' in event for event in stream.events) > 1


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "beside the root": (400, {"lora_path": "../beside"}, "--lora-root"),
    "elsewhere": (400, {"lora_path": "/etc"}, "--lora-root"),
    "nothing there": (400, {"lora_path": "nothing"}, "adapter_config.json"),
    "no path": (400, {}, "lora_path"),
    "another field": (400, {"lora_path": "sql", "load_inplace": True}, "load_inplace"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_load_says_why(what: str, admin: httpx.Client, http: httpx.Client) -> None:
    status, body, problem = REFUSED[what]
    assert problem in post(admin, "load", "new", status, **body)["error"]["message"]
    assert "new" not in {entry["id"] for entry in http.get("/v1/models").json()["data"]}


def test_names_that_are_taken_or_unknown_are_refused(admin: httpx.Client, http: httpx.Client, model: Path) -> None:
    post(admin, "load", model.name, 400, lora_path="sql")
    assert "unload it first" in post(admin, "load", "start", 400, lora_path="sql")["error"]["message"]
    post(admin, "load", "start", lora_path="start")
    post(admin, "unload", "none", 404)
    for body in ({"model": "none"}, {"lora_path": "none"}):
        assert complete(http, 404, **body)["error"]["code"] == "model_not_found"
    assert "`start`" in complete(http, 404, model="none")["error"]["message"], "what is served is told"


def test_files_with_another_digest_than_the_wanted_one_never_get_the_name(
    admin: httpx.Client, http: httpx.Client
) -> None:
    digest = http.get("/v1/models/start").json()["digest"]
    said = post(admin, "load", "wanted", 400, lora_path="sql", digest=digest[:16])
    assert f"{digest[:16]} is wanted" in said["error"]["message"]
    assert http.get("/v1/models/wanted").status_code == 404
    post(admin, "load", "wanted", lora_path="start", digest=digest[:16])
    post(admin, "unload", "wanted")


async def test_a_volume_that_does_not_answer_holds_up_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, hangs, asked = asyncio.Event(), asyncio.Event(), list[str]()

    async def to_thread(_: object, path: str) -> None:
        asked.append(path)
        looked.set()
        await hangs.wait()

    async def ask(*_: object, **__: object) -> messages.Reply:
        asked.append("scheduler")
        return messages.Reply("", data={"digest": "d"})

    monkeypatch.setattr(administration.asyncio, "to_thread", to_thread)
    manager = SimpleNamespace(ranks=[0], ask=ask)
    state = SimpleNamespace(ready=True, adapters={})
    service = SimpleNamespace(state=state, manager=manager, model_name="base")
    made = administration.Administration(service, SimpleNamespace(lora_root="/root", start_timeout=1.0, dp_size=1))  # type: ignore[arg-type]
    fields = {"lora_name": "sql", "lora_path": "claims/a"}
    request = SimpleNamespace(query_params={}, json_object=lambda: fields)
    loading = asyncio.create_task(made.load_adapter(request))  # type: ignore[arg-type]
    await looked.wait()
    assert asked == ["/root/claims/a"]
    hangs.set()
    await loading
    assert asked[1:] == ["scheduler"]
    assert state.adapters == {"sql": "d"}


def test_a_version_of_a_model_with_the_longest_name_can_be_loaded(admin: httpx.Client, http: httpx.Client) -> None:
    name = version_name("m" * 256, "hf://o/a", "")
    post(admin, "load", name, lora_path="sql")
    assert complete(http, model=name)["model"] == name
    post(admin, "unload", name)


def test_a_listed_name_is_the_adapter_of_that_name(admin: httpx.Client, http: httpx.Client, model: Path) -> None:
    name = f"{model.name}:start"
    expected = text(http, model="start")
    assert text(http, model=name) == expected
    post(admin, "load", name, lora_path="sql")
    assert text(http, model=name) == text(http, model=f"{model.name}:{name}") != expected
    post(admin, "unload", name)


def test_adapters_are_loaded_by_administrators_alone(http: httpx.Client) -> None:
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "sql"}).status_code == 404


def test_an_adapter_that_cannot_be_read_again_is_not_listed_until_it_is_loaded_again(
    model: Path, tmp_path: Path
) -> None:
    for seed, name in enumerate(("one", "two")):
        adapter(tmp_path / name, seed)
    weights, away = tmp_path / "one" / WEIGHTS, tmp_path / "away"
    flags = ("--max-total-tokens=4096", f"--lora-root={tmp_path}", "--max-lora-memory=20KiB")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(model, *flags))
        http, admin = (
            stack.enter_context(httpx.Client(base_url=url, timeout=60)) for url in (server.url, server.admin_url)
        )
        for name in ("one", "two"):
            post(admin, "load", name, lora_path=name)
        weights.rename(away)
        assert "load it again" in complete(http, 500, model="one")["error"]["message"]
        listed = lambda: {one["id"] for one in http.get("/v1/models").json()["data"]}  # noqa: E731
        eventually(lambda: listed() == {model.name, "two"}, what="the lost one to leave the list")
        assert Engine(server.url, server.admin_url).loaded()["one"] == ""
        away.rename(weights)
        post(admin, "load", "one", lora_path="one")
        assert complete(http, model="one")["model"] == "one"
        eventually(lambda: "one" in listed(), what="it to be listed again")


def test_a_bad_adapter_ends_the_start_with_its_name(model: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "dora", 0, use_dora=True)
    server = ServerProcess(model, "--no-events", "--lora-modules", f"mine={folder}")
    assert server.wait() == 1
    assert any("--lora-modules mine=" in line and "DoRA" in line for line in server.log), server.log


def test_an_adapter_has_not_the_name_of_the_model(model: Path, root: Path) -> None:
    server = ServerProcess(model, "--no-events", "--lora-modules", f"{model.name}={root / 'below/sql'}")
    assert server.wait() == 1
    assert any("--lora-modules" in line and "the name of the model" in line for line in server.log), server.log


@pytest.mark.deep
@pytest.mark.parametrize("division", ["--tp-size=2", "--pp-size=2", "--dp-size=2"])
def test_two_ranks_serve_the_same_adapters(division: str, model: Path, root: Path) -> None:
    flags = ("--max-total-tokens=4096", f"--lora-root={root / 'below'}", "--no-events")
    with running(model, *flags) as one, running(model, *flags, division) as two:
        answers = []
        for server in (one, two):
            with server.client() as http, server.admin() as admin:
                post(admin, "load", "sql", lora_path="sql")
                answers.append([text(http, model=name) for name in ("sql", model.name) for _ in range(3)])
                assert post(admin, "load", "gone", 400, lora_path="gone")
                post(admin, "unload", "sql")
                complete(http, 404, model="sql")
                assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == [model.name]
        assert answers[0] == answers[1]
        assert answers[0][0] != answers[0][-1]


def test_vllms_gauge_names_the_adapters_of_all_ranks_as_they_are_now() -> None:
    metrics = Metrics("m", ranks=2)

    def shown() -> list[str]:
        lines = metrics.render().decode().splitlines()
        return [line.rpartition(" ")[0] for line in lines if line.startswith("vllm:lora_requests_info{")]

    assert shown() == [], "it serves no adapters"
    metrics.on_load(LoadUpdate(max_loras=4, running_adapters=["sql", "law"]), 0)
    metrics.on_load(LoadUpdate(max_loras=4, running_adapters=["law"], waiting_adapters=["art"]), 1)
    labels = 'max_lora="8",running_lora_adapters="law,sql",waiting_lora_adapters="art"'
    assert shown() == [f"vllm:lora_requests_info{{{labels}}}"]
    metrics.on_load(LoadUpdate(max_loras=4), 0)
    labels = 'max_lora="8",running_lora_adapters="law",waiting_lora_adapters="art"'
    assert shown() == [f"vllm:lora_requests_info{{{labels}}}"], "earlier ones are gone"
    metrics.on_load(LoadUpdate(max_loras=4, resident=["0a", "0b"]), 1)
    page = metrics.render().decode()
    assert 'treeline:lora_pool_slots_used{dp_rank="1",model_name="m"} 2.0' in page
    assert 'treeline:lora_pool_slots_total{dp_rank="1",model_name="m"} 4.0' in page
