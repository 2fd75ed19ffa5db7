"""Weights and KV memory that are released and restored, replaced weights, traces: the engine in-process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.runtime_engine import Harness, dummy_model, prompt, write_config
from support.runtime_server import make_checkpoint
from treeline_runtime import Engine, GenerationError, SamplingParams
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.messages import GenerateReq, SleepReq, UpdateWeightsReq, WakeReq
from treeline_runtime.models.offload import Offloaded, size_of, tensors_of
from treeline_runtime.ops import onednn
from treeline_runtime.published import Cleared
from treeline_runtime.scheduler.executor import Executor

pytestmark = pytest.mark.deep

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 1024, "threads": 1}
IDS = prompt(1, 40)
MB = 1 << 20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return make_checkpoint(folder / "a", seed=1), make_checkpoint(folder / "b", seed=2)


def test_sleep_returns_the_memory_to_the_system(tmp_path: Path) -> None:
    path = write_config(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    process = psutil.Process()
    with Engine(path, load_format="dummy", page_size=16, max_total_tokens=1 << 18, threads=1) as engine:
        engine.generate(IDS, GREEDY)
        executor = engine.scheduler.executor
        executor.pool._all.fill_(1)  # as if it had been full
        pool, weights = executor.pool._all.nbytes, size_of(executor._model)
        assert pool > 100 * MB
        assert weights > 40 * MB
        del executor
        awake = process.memory_info().rss
        engine.sleep(1)
        without_pool = process.memory_info().rss
        assert awake - without_pool > 0.9 * pool
        engine.wake_up()
        engine.sleep(2)
        assert without_pool - process.memory_info().rss > 0.7 * weights, "all but what waking up took"
        engine.wake_up()
        assert len(engine.generate(IDS, GREEDY).token_ids) == 8


def test_a_sleeping_scheduler_reports_an_empty_cache_and_its_sleep(tmp_path: Path) -> None:
    engine = Harness(write_config(tmp_path))
    engine.generate("1", prompt(1, 20))
    engine.inbox.append(SleepReq("s", 2))
    engine.step()
    assert engine.replies[-1].ok
    assert engine.updates[-1].events == [Cleared()]
    assert engine.loads[-1].asleep == 2
    engine.submit("2", prompt(1, 20))
    engine.run()
    finish = engine.finish("2")
    assert (finish.status, finish.message) == (503, "the engine is asleep")
    engine.inbox.append(WakeReq("w"))
    engine.step()
    assert engine.loads[-1].asleep == 0
    assert engine.generate("3", prompt(1, 20)) == engine.tokens("1")


def test_nothing_sleeps_or_changes_while_requests_run(tmp_path: Path) -> None:
    engine = Harness(write_config(tmp_path))
    engine.submit("1", prompt(1, 20))
    engine.step()
    engine.inbox += [SleepReq("s"), UpdateWeightsReq("u", str(tmp_path))]
    engine.run()
    assert [(reply.ok, (reply.data or {}).get("busy")) for reply in engine.replies] == [(False, True)] * 2
    assert len(engine.tokens("1")) == 8


def test_new_weights_answer_like_an_engine_started_with_them(checkpoints: tuple[Path, Path]) -> None:
    old, new = checkpoints
    with Engine(new, **SETTINGS) as engine:
        expected = engine.generate(IDS, GREEDY).token_ids
    with Engine(old, **SETTINGS) as engine:
        first = engine.generate(IDS, GREEDY)
        engine.update_weights(new)
        output = engine.generate(IDS, GREEDY)
        assert output.token_ids == expected != first.token_ids
        assert output.cached_tokens == 0, "what the old weights computed is forgotten"
        with pytest.raises(ValueError, match="level is 1 or 2"):
            engine.sleep(3)
        engine.sleep(2)
        engine.wake_up()
        assert engine.generate(IDS, GREEDY).token_ids == expected, "they are what is read again"
        engine.sleep(1)
        engine.update_weights(old)
        engine.wake_up()
        assert engine.generate(IDS, GREEDY).token_ids == first.token_ids


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "has no \\*.safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"nonsense"), "cannot read"),
        (lambda path: (path / "config.json").write_text("{}"), "model_type None is not supported"),
        (lambda path: _change(path, num_hidden_layers=1), "num_layers is 1, not 2"),
    ],
)
def test_weights_that_cannot_be_served_leave_the_old_ones(
    checkpoints: tuple[Path, Path], tmp_path: Path, harm: Any, problem: str
) -> None:
    bad = make_checkpoint(tmp_path / "bad")
    harm(bad)
    with Engine(checkpoints[0], **SETTINGS) as engine:
        before = engine.generate(IDS, GREEDY).token_ids
        with pytest.raises(RuntimeError, match=problem):
            engine.update_weights(bad)
        with pytest.raises(RuntimeError, match="is not a folder"):
            engine.update_weights(tmp_path / "nowhere")
        assert engine.generate(IDS, GREEDY).token_ids == before
        engine.sleep(2)
        engine.wake_up()
        assert engine.generate(IDS, GREEDY).token_ids == before


def _change(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_a_sleep_continues_if_memory_is_short(checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(checkpoints[0], **SETTINGS) as engine:
        before = engine.generate(IDS, GREEDY).token_ids
        engine.sleep(2)

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr("treeline_runtime.scheduler.administration.Executor", full)
            with pytest.raises(RuntimeError, match=r"no memory for the KV pool.*weights .* GiB.*KV pool .* GiB.*free"):
                engine.wake_up()
            with pytest.raises(GenerationError, match="asleep"):
                engine.generate(IDS, GREEDY)
        engine.wake_up()
        assert engine.generate(IDS, GREEDY).token_ids == before


def test_a_models_tensors_move_to_the_host_and_return_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 1 as on a GPU, here on a CPU."""
    monkeypatch.setattr(onednn, "can_pack", lambda _: False)
    model = dummy_model(SchedulerConfig(model=str(write_config(tmp_path, num_hidden_layers=1)), load_format="dummy"))
    tensors = tensors_of(model)
    assert len(tensors) == len({id(one) for one in tensors}) >= 12
    assert sum(one.numel() for one in tensors) * 4 >= size_of(model) > 0
    before = [(one.clone(), one.stride(), one.untyped_storage().data_ptr()) for one in tensors]
    with torch.inference_mode():
        offloaded = Offloaded(model)
        assert size_of(model) == 0
        offloaded.restore()
        offloaded.release()
        assert size_of(model) == 0
        offloaded.restore()
    for tensor, (values, stride, _) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor.stride() == stride
    shared = {old: tensor.untyped_storage().data_ptr() for tensor, (_, _, old) in zip(tensors, before, strict=True)}
    assert all(
        shared[old] == tensor.untyped_storage().data_ptr() for tensor, (_, _, old) in zip(tensors, before, strict=True)
    ), "what shared memory shares it again"


def test_a_profile_ends_after_its_steps_or_when_it_is_stopped(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    with Engine(checkpoints[0], **SETTINGS) as engine:
        engine.start_profile(tmp_path / "traces", steps=3)
        with pytest.raises(RuntimeError, match="3 steps are left"):
            engine.start_profile(tmp_path)
        engine.generate(IDS, GREEDY)
        (trace,) = (tmp_path / "traces").iterdir()
        names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert names & {"aten::mm", "aten::linear", "mkldnn::_linear_pointwise"}
        with pytest.raises(RuntimeError, match="no profile is running"):
            engine.stop_profile()
        engine.start_profile(tmp_path / "traces")
        assert engine.stop_profile().exists()
        (tmp_path / "file").write_text("")
        with pytest.raises(RuntimeError, match="cannot write to the profile folder"):
            engine.start_profile(tmp_path / "file")
        with pytest.raises(RuntimeError, match="1 to 1000 steps, not 0"):
            engine.start_profile(tmp_path, steps=0)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
    ids=["torch", "CUDA"],
)
def test_out_of_memory_at_load_gives_the_numbers_and_the_fix(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    with pytest.raises(ConfigError, match=r"no memory left for the KV pool: .* GiB are free.*raise mem_fraction"):
        Engine(checkpoints[0], mem_fraction=1e-9)

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr("treeline_runtime.scheduler.administration.load_model", full)
    with pytest.raises(ConfigError, match=r"no memory for the weights: .* GiB free: .*a smaller model \(CUDA .*out of"):
        Engine(checkpoints[0], **SETTINGS)


def test_weights_that_do_not_fit_beside_the_old_ones_leave_them(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes after all new weights were read."""
    with Engine(checkpoints[0], **SETTINGS) as engine:
        before = engine.generate(IDS, GREEDY).token_ids
        executors = [Executor]

        def full_once(*args: Any, **options: Any) -> Executor:
            if executors:
                executors.pop()
                raise torch.OutOfMemoryError("CUDA out of memory")
            return Executor(*args, **options)

        monkeypatch.setattr("treeline_runtime.scheduler.administration.Executor", full_once)
        with pytest.raises(RuntimeError, match="no memory for the KV pool"):
            engine.update_weights(checkpoints[1])
        assert engine.generate(IDS, GREEDY).token_ids == before


def test_an_embedding_model_sleeps_and_gets_new_weights_too(tmp_path: Path) -> None:
    old, new = make_checkpoint(tmp_path / "old", seed=1), make_checkpoint(tmp_path / "new", seed=2)
    for path in (old, new):
        _change(path, tie_word_embeddings=False)  # without a head, which vectors do not need

    def vector(engine: Harness, rid: str) -> bytes | None:
        engine.inbox.append(GenerateReq(rid, IDS, SamplingParams(max_new_tokens=0), pools=True))
        engine.run()
        return engine.last(rid).vector

    engine = Harness(old, task="embed", load_format="auto")
    before = vector(engine, "old")
    engine.inbox.append(UpdateWeightsReq("u", str(new)))
    engine.run()
    assert engine.replies[-1].ok, engine.replies[-1].message
    fresh = vector(engine, "new")
    engine.inbox += [SleepReq("s", 2), WakeReq("w")]
    engine.run()
    assert vector(engine, "again") == fresh != before
    _change(old, architectures=["Qwen3ForSequenceClassification"], num_labels=2)
    engine.inbox.append(UpdateWeightsReq("u", str(old)))
    engine.run()
    assert not engine.replies[-1].ok
    still = vector(engine, "still")  # behind a cached prefix: in another order of sums
    assert still is not None
    assert fresh is not None
    torch.testing.assert_close(*(torch.frombuffer(bytearray(found), dtype=torch.float32) for found in (still, fresh)))
