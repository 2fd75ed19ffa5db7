"""The container beside a runtime: it loads and unloads what its file says, and reports how that stands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import write_adapter
from support.fake_hub import FakeHub, FakeRepo, running_hub
from support.runtime_server import ServerProcess, eventually, running
from treeline_runtime.fetch.adapters import Engine, Failure, Keeper, changes
from treeline_wire.live_adapters import AdapterReport, AdapterWish, is_version, version_name, wishes_text

pytestmark = pytest.mark.integration

SHAPES = {f"layers.{i}.self_attn.q_proj": (32, 32) for i in range(2)}
NAMES = st.sampled_from(["a@0000000000", "b@0000000000", "by-hand"])


@given(st.sets(NAMES), st.sets(NAMES), st.sets(NAMES), st.dictionaries(NAMES, st.floats(0, 10)), st.floats(0, 10))
def test_only_what_is_missing_is_loaded_and_only_what_is_ours_is_unloaded(
    wished: set[str], loaded: set[str], busy: set[str], again: dict[str, float], now: float
) -> None:
    wishes = {name: AdapterWish(name, "hf://o/a") for name in wished}
    failed = {name: Failure("no", at) for name, at in again.items()}
    loads, unloads = changes(wishes, loaded, busy, failed, now)
    assert {wish.name for wish in loads} == {n for n in wished - loaded - busy if again.get(n, 0.0) <= now}
    assert set(unloads) == {name for name in loaded - wished - busy if is_version(name)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "claims/sets/poet", SHAPES, seed=1, size=0.8)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, root: Path) -> Iterator[ServerProcess]:
    with running(model, "--max-total-tokens=4096", "--max-loras=2", "--max-lora-rank=8", f"--lora-root={root}") as one:
        yield one


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = write_adapter(tmp_path / "sql", SHAPES, seed=2, size=0.8)
    broad = write_adapter(tmp_path / "broad", SHAPES, seed=3, rank=16)
    repos = {at.name: FakeRepo({file.name: file.read_bytes() for file in at.iterdir()}) for at in (folder, broad)}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40, total=1 << 40))
    with running_hub(**repos) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found


class Clock:
    """A time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(server: ServerProcess, root: Path, clock: Clock) -> Iterator[Keeper]:
    made = Keeper(Engine(server.url, server.admin_url), root, clock)
    yield made
    settled(made)


def settled(keeper: Keeper, *wishes: AdapterWish) -> AdapterReport:
    """Step until every wish is loaded or has failed and nothing else is loaded; return the report."""
    text = wishes_text(wishes)

    def step() -> AdapterReport | None:
        report = keeper.step(text)
        listed = {name for name in keeper.engine.loaded() if is_version(name)}
        known = report.loaded.keys() | report.errors.keys()
        return report if known >= {wish.name for wish in wishes} and listed == report.loaded.keys() else None

    report: AdapterReport = eventually(step, what="the adapters to be as wished")
    return report


def wish(name: str, uri: str, digest: str = "") -> AdapterWish:
    return AdapterWish(version_name(name, uri, digest), uri, digest)


@pytest.mark.usefixtures("hub")
def test_wishes_are_loaded_from_hub_and_claim_and_what_is_not_wished_goes_with_its_files(
    keeper: Keeper, http: httpx.Client, admin: httpx.Client, root: Path
) -> None:
    admin.post("/v1/load_lora_adapter", json={"lora_name": "by-hand", "lora_path": "claims/sets/poet"})
    sql, poet = wish("sql", "hf://org/sql"), wish("poet", "pvc://sets/poet")
    report = settled(keeper, sql, poet)
    assert report.loaded.keys() == {sql.name, poet.name}
    assert not report.errors
    answer = http.post("/v1/completions", json={"prompt": "hello", "model": sql.name, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert len(list((root / "fetched").glob("*/adapter_model.safetensors"))) == 1
    report = settled(keeper, wish("sql", "hf://org/sql", report.loaded[sql.name]))
    assert len(report.loaded) == 1, "the digest that it reported is one to wish for"
    settled(keeper)

    def tidied() -> bool:
        """Files go in the step after the one that sees the unload."""
        keeper.step("[]")
        return not list((root / "fetched").glob("*/adapter_model.safetensors"))

    eventually(tidied, what="its files go")
    assert "by-hand" in keeper.engine.loaded(), "it is not ours"
    admin.post("/v1/unload_lora_adapter", json={"lora_name": "by-hand"})


def test_what_cannot_be_loaded_is_said_holds_up_nothing_and_is_tried_again(
    keeper: Keeper, hub: FakeHub, clock: Clock, tmp_path: Path
) -> None:
    broad, gone, other = (
        wish("broad", "hf://org/broad"),
        wish("gone", "hf://org/gone"),
        wish("x", "hf://org/sql", "0" * 16),
    )
    good = wish("poet", "pvc://sets/poet")
    report = settled(keeper, broad, gone, other, good)
    assert report.loaded.keys() == {good.name}
    assert "rank" in report.errors[broad.name]
    assert "org/gone" in report.errors[gone.name]
    assert "is wanted" in report.errors[other.name]
    files = write_adapter(tmp_path / "mended", SHAPES, seed=5)
    hub.repos["org/broad"] = FakeRepo({file.name: file.read_bytes() for file in files.iterdir()})
    assert broad.name not in settled(keeper, broad, good).loaded, "it is not tried without a pause"
    clock.now += 60.0
    eventually(lambda: broad.name in keeper.step(wishes_text([broad, good])).loaded, what="the mended adapter")


def test_an_engine_that_does_not_answer_and_a_text_of_somebody_else_are_reported(root: Path) -> None:
    nobody = Keeper(Engine("http://127.0.0.1:9", "http://127.0.0.1:9"), root)
    assert "the runtime does not answer" in nobody.step("[]").errors[""]
    assert nobody.step("no json").errors[""]
