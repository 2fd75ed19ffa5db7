"""An engine whose model is split over several processes: it answers like one process, and ends with a lost one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import forked_ranks
from support.eagle_heads import write_head
from support.pooling_models import configured
from support.processors import Follows
from support.runtime_engine import prompt
from support.runtime_server import eventually, gone, make_checkpoint, running
from treeline_runtime import Engine, GenerationError, SamplingParams
from treeline_runtime.messages import CustomProcessor, Grammar
from treeline_runtime.models import ModelError
from treeline_runtime.scheduler import Scheduler, administration, drafting, ngrams, scheduler, table
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.ranks import group as group_module
from treeline_runtime.scheduler.ranks.group import Followers
from treeline_runtime.scheduler.ranks.protocol import Call, Command, Copy, Delayed, Launch, Settle, Step
from treeline_runtime.scheduler_thread import EngineDead

pytestmark = [pytest.mark.deep, pytest.mark.usefixtures("ranks_are_forked", "nothing_is_left")]

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 512, "device": "cpu", "threads": 1}
IDS = prompt(1, 40)


# ---- the same answers ---------------------------------------------------------------------------------------------


def kinds() -> list[SamplingParams]:
    """Return parameters of every kind that takes its own way through a step."""
    common: dict[str, Any] = {"max_new_tokens": 24}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, seed=1, **common),
        SamplingParams(temperature=0.8, top_p=0.7, seed=2, **common),
        SamplingParams(temperature=1.2, top_k=5, min_p=0.01, seed=3, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, **common),
        SamplingParams(temperature=1.0, seed=4, bad_words=((5,), (6, 7)), logit_bias={9: 2.0}, **common),
        SamplingParams(temperature=1.0, seed=5, grammar=Grammar("regex", "[a-f]{1,9}(, [a-f]{2})*"), max_new_tokens=12),
        SamplingParams(temperature=0.0, grammar=Grammar("choice", '["yes it is", "no it is not"]'), max_new_tokens=24),
        SamplingParams(
            temperature=1.0, seed=6, logit_processor=CustomProcessor.of("follows", {"key": "ranks"}), **common
        ),
    ]


def answers(path: Path, **sizes: Any) -> list[Any]:
    """Return everything that an engine says to many requests at once, in a cache that is too small for them."""
    each = kinds() * 3
    prompts = [prompt(i, 10 + 4 * i) for i in range(len(each))]
    settings = SETTINGS | {
        "max_total_tokens": 240,
        "schedule_conservativeness": 0.0,
        "chunked_prefill_size": 32,
        "overlap_depth": 1,
    }
    with Engine(
        path, logit_processors={"follows": Follows}, enable_return_hidden_states=True, **settings, **sizes
    ) as engine:
        outputs = engine.generate(prompts, each, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
        assert sum(output.retractions for output in outputs), "some requests lost their place"
        shown = engine.generate(IDS, GREEDY, return_hidden_states=True)
        return [
            [output.token_ids for output in outputs],
            [output.finish for output in outputs],
            [round(value, 3) for output in outputs for value, _ in output.output_token_logprobs],
            [round(value, 3) for output in outputs for value, _ in output.input_token_logprobs if value is not None],
            shown.token_ids,
            [round(float(value), 3) for row in shown.hidden_states for value in row],
        ]


SIZES = [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2}]


@pytest.fixture(scope="module")
def alone(checkpoints: tuple[Path, Path]) -> list[Any]:
    """Return the answers of one rank."""
    return answers(checkpoints[0])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_requests_of_all_kinds_get_the_answers_of_one_rank(
    sizes: dict[str, int], checkpoints: tuple[Path, Path], alone: list[Any]
) -> None:
    for found, expected in zip(answers(checkpoints[0], **sizes), alone, strict=True):
        assert found == pytest.approx(expected, abs=2e-3) if isinstance(found[0], float) else found == expected


@pytest.mark.parametrize(
    ("sizes", "drafter"), [(SIZES[0], "NGRAM"), (SIZES[1], "NGRAM"), ({"tp_size": 2}, "EAGLE3")], ids=str
)
def test_ranks_verify_the_guesses_of_rank_0(
    sizes: dict[str, int],
    drafter: str,
    checkpoints: tuple[Path, Path],
    alone: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, 4),)),))
    monkeypatch.setattr(drafting, "WAIT", -1.0)
    monkeypatch.setattr(ngrams, "LENGTHS", (1,))  # it guesses often
    settings: dict[str, Any] = sizes | {"speculative_algorithm": drafter}
    if drafter == "EAGLE3":  # with the model's embedding and head, of which each rank has a part
        settings["speculative_draft_model_path"] = str(write_head(tmp_path / "head", checkpoints[0], (0, 1, 1)))
    drafts, plan_of = [0], table.plan_of

    def counted(*args: Any, **kwargs: Any) -> StepPlan:
        plan = plan_of(*args, **kwargs)
        drafts[0] += len(plan.drafts)
        return plan

    monkeypatch.setattr(scheduler, "plan_of", counted)
    for found, expected in zip(answers(checkpoints[0], **settings), alone, strict=True):
        assert found == pytest.approx(expected, abs=2e-3) if isinstance(found[0], float) else found == expected
    assert drafts[0] > 20


def test_ranks_with_whole_experts_give_the_answers_of_one(tmp_path: Path) -> None:
    experts = make_checkpoint(tmp_path, experts=8)
    for found, expected in zip(answers(experts, tp_size=2, ep_size=2), answers(experts), strict=True):
        assert found == pytest.approx(expected, abs=2e-3) if isinstance(found[0], float) else found == expected


def test_a_large_step_passes_the_stages_in_micro_batches(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, parts = [prompt(i, 90 + 5 * i) for i in range(9)], []
    settings = SETTINGS | {"max_total_tokens": 2048}
    with Engine(checkpoints[0], **settings) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    micro_batches = StepPlan.micro_batches

    def counted(self: StepPlan, stages: int) -> list[tuple[int, int]]:
        parts.append(len(micro_batches(self, stages)))
        return micro_batches(self, stages)

    monkeypatch.setattr(StepPlan, "micro_batches", counted)
    with Engine(checkpoints[0], pp_size=2, **settings) as engine:
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    assert set(parts) == {1, 2}


@pytest.mark.parametrize("sizes", [{"tp_size": 4}, {"tp_size": 2, "pp_size": 2}], ids=str)
def test_four_ranks_sleep_wake_and_change_weights_as_one(
    sizes: dict[str, int], checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = checkpoints
    with Engine(new, **SETTINGS) as engine:
        expected = engine.generate(IDS, GREEDY).token_ids
    broken = make_checkpoint(tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    with Engine(old, **SETTINGS, **sizes) as engine:
        first = engine.generate(IDS, GREEDY).token_ids
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert engine.generate(IDS, GREEDY).token_ids == first
        with pytest.raises(RuntimeError, match=r"has no \*.safetensors"):
            engine.update_weights(broken)
        assert engine.generate(IDS, GREEDY).token_ids == first, "the old ones stay on every rank"
        engine.update_weights(new)
        assert engine.generate(IDS, GREEDY).token_ids == expected != first
        engine.sleep(1)
        engine.update_weights(old)
        engine.wake_up()
        assert engine.generate(IDS, GREEDY).token_ids == first


def test_a_rank_that_cannot_load_keeps_the_others_from_waking(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path / "model", seed=1)
    with Engine(path, tp_size=2, **SETTINGS) as engine:
        first = engine.generate(IDS, GREEDY).token_ids
        engine.sleep(2)
        away = path.with_name("away")
        send = Followers.tell

        def hide(self: Followers, command: Command) -> None:
            """Let rank 0 alone find weights."""
            if command == Call("wake"):
                path.rename(away)
            send(self, command)
            if command == Call("wake"):
                self._votes.put(self._votes.get())
                away.rename(path)

        with monkeypatch.context() as patch:
            patch.setattr(Followers, "tell", hide)
            with pytest.raises(RuntimeError, match=r"^rank 1: .* is not a directory"):
                engine.wake_up()
        engine.wake_up()
        assert engine.generate(IDS, GREEDY).token_ids == first


def test_an_unexpected_error_of_one_rank_leaves_all_with_the_old_weights(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = checkpoints

    def fail(*_: object) -> None:
        raise OSError("the disk is broken")

    with Engine(old, tp_size=2, **SETTINGS) as engine:
        first = engine.generate(IDS, GREEDY).token_ids
        with monkeypatch.context() as patch:
            patch.setattr(administration, "load_model", fail)
            with pytest.raises(RuntimeError, match="the disk is broken"):
                engine.update_weights(new)
        assert engine.generate(IDS, GREEDY).token_ids == first
        engine.update_weights(new)
        assert engine.generate(IDS, GREEDY).token_ids != first


def test_all_ranks_read_a_relative_path_from_where_the_engine_is(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = checkpoints
    with Engine(new, **SETTINGS) as engine:
        expected = engine.generate(IDS, GREEDY).token_ids
    head = write_head(tmp_path / "head", old, (0, 1, 1))
    monkeypatch.chdir(old.parent)
    drafter = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": os.path.relpath(head)}
    with Engine(old.name, tp_size=2, **drafter, **SETTINGS) as engine:
        monkeypatch.chdir(new)
        first = engine.generate(IDS, GREEDY).token_ids
        engine.sleep(2)
        engine.wake_up()
        assert engine.generate(IDS, GREEDY).token_ids == first
        engine.update_weights(".")
        assert engine.generate(IDS, GREEDY).token_ids == expected


def test_a_request_at_fault_ends_alone(checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such result")

    with Engine(checkpoints[0], tp_size=2, **SETTINGS) as engine:
        first = engine.generate(IDS, GREEDY).token_ids
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_advance", fail)
            with pytest.raises(GenerationError, match="no such result"):
                engine.generate(IDS, GREEDY)  # its pages are in the tree: none has to be cleared
            with pytest.raises(GenerationError, match="no such result"):
                engine.generate(prompt(2, 30), GREEDY)
        with pytest.raises(GenerationError, match="OverflowError"):
            engine.generate(IDS, SamplingParams(seed=1 << 70, top_k=4))
        assert engine.generate(IDS, GREEDY).token_ids == first


def test_vectors_of_two_ranks_are_those_of_one_and_a_stopped_server_leaves_no_rank(tmp_path: Path) -> None:
    path = configured(tmp_path, "Qwen3Model")
    alone = vectors(path)
    for flag in ("--tp-size", "--pp-size"):
        assert vectors(path, flag, "2") == pytest.approx(alone, abs=1e-5)


def vectors(path: Path, *flags: str) -> list[float]:
    with running(path, "--device", "cpu", "--threads", "1", "--no-events", *flags) as server:
        ranks = forked_ranks.processes()
        assert len(ranks) == bool(flags)
        answer = server.client().post("/v1/embeddings", json={"input": ["a word", "two words more"]})
        assert server.stop() == 0
        eventually(lambda: all(gone(rank.pid) for rank in ranks), what="the ranks end")
        return [value for one in answer.json()["data"] for value in one["embedding"]]


# ---- a rank is lost -----------------------------------------------------------------------------------------------


def nth(kind: type, n: int) -> Callable[[Command], bool]:
    seen = 0

    def wanted(command: Command) -> bool:
        nonlocal seen
        seen += isinstance(command, kind)
        return isinstance(command, kind) and seen == n

    return wanted


PHASES: dict[str, Callable[[], Callable[[Command], bool]]] = {
    "meeting": lambda: nth(Settle, 1),
    "loading": lambda: nth(Settle, 2),
    "agreeing": lambda: nth(Settle, 3),
    "prefill": lambda: nth(Step, 1),
    "decode": lambda: nth(Step, 4),
    "sampling": lambda: nth(Delayed, 2),
    "copying": lambda: nth(Copy, 1),
    "sleeping": lambda: lambda command: command == Call("sleep", 2),
    "waking": lambda: lambda command: command == Call("wake"),
    "changing": lambda: lambda command: isinstance(command, Call) and command.name == "update",
}


def work(path: Path, ranks: int, stages: int = 1) -> None:
    """Go through all phases of an engine's life."""
    with Engine(path, tp_size=ranks, pp_size=stages, host_cache=1 << 20, **SETTINGS) as engine:
        grammar = SamplingParams(temperature=0.0, grammar=Grammar("regex", "[a-f]{9}"), max_new_tokens=12)
        engine.generate([IDS, IDS], [GREEDY, grammar])
        engine.sleep(2)
        engine.wake_up()
        engine.update_weights(path)
        engine.generate(IDS, GREEDY)


def harm(monkeypatch: pytest.MonkeyPatch, phase: str, rank: int, deed: Callable[[int], None]) -> None:
    """Do that to a rank's process when rank 0 has told it of this phase."""
    wanted, send = PHASES[phase](), Followers.tell

    def harming(self: Followers, command: Command) -> None:
        send(self, command)
        if wanted(command):
            child = self._peers[rank - 1].child
            assert child is not None
            deed(child.pid)

    monkeypatch.setattr(Followers, "tell", harming)


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_ends_the_engine_with_its_name(
    phase: str, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch, phase, 1, lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises((EngineDead, RuntimeError), match="rank 1 was killed by SIGKILL"):
        work(checkpoints[0], 2)


@pytest.mark.parametrize("phase", ["loading", "decode", "waking"])
def test_of_four_ranks_the_one_that_died_first_is_named(
    phase: str, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch, phase, 3, lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises((EngineDead, RuntimeError), match="rank 3 was killed by SIGKILL"):
        work(checkpoints[0], 4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_of_two_stages_with_two_ranks_the_rank_that_died_first_is_named(
    rank: int, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch, "decode", rank, lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises((EngineDead, RuntimeError), match=f"rank {rank} was killed by SIGKILL"):
        work(checkpoints[0], 2, stages=2)


def test_a_stopped_stage_is_noticed(checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "SILENT_S", 4.0)
    harm(monkeypatch, "prefill", 1, lambda pid: os.kill(pid, signal.SIGSTOP))
    with pytest.raises((EngineDead, RuntimeError), match="rank 1 has been silent for 4 s"):
        work(checkpoints[0], 1, stages=2)


@pytest.mark.parametrize("phase", ["prefill", "decode", "waking"])
def test_a_stopped_rank_is_noticed(phase: str, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "SILENT_S", 4.0)
    harm(monkeypatch, phase, 1, lambda pid: os.kill(pid, signal.SIGSTOP))
    with pytest.raises((EngineDead, RuntimeError), match="rank 1 has been silent for 4 s"):
        work(checkpoints[0], 2)


def test_a_rank_that_would_compute_a_step_otherwise_ends_the_engine_before_it_does(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Executor, "_how", lambda self, plan: Launch("prompt graph", 64))
    with pytest.raises(
        (EngineDead, RuntimeError), match="rank 1: its step of 1 sequences uses no graph, rank 0's prompt graph of 64"
    ):
        work(checkpoints[0], 2)


def test_a_step_that_fails_on_rank_0_ends_the_engine_with_the_error(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(Executor, "_launch", fail)
    with pytest.raises((EngineDead, RuntimeError), match=r"rank 0: ValueError\('no such thing'\)"):
        work(checkpoints[0], 2)


def test_requests_of_a_lost_group_end_with_an_error_though_the_scheduler_still_waits(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where nothing ends the wait for a lost rank."""
    stuck, let_go = threading.Event(), threading.Event()
    launch = Executor._launch

    def wait(self: Executor, plan: Any, how: Launch) -> Any:
        if plan.decodes:
            stuck.set()
            let_go.wait()
        return launch(self, plan, how)

    engine = Engine(checkpoints[0], tp_size=2, **SETTINGS)
    monkeypatch.setattr(Executor, "_launch", wait)
    killer = threading.Thread(target=lambda: (stuck.wait(), forked_ranks.processes()[0].kill()))
    killer.start()
    try:
        with pytest.raises(EngineDead, match="rank 1 was killed by SIGKILL"):
            engine.generate(IDS, GREEDY)
        with pytest.raises(EngineDead, match="rank 1 was killed by SIGKILL"):
            engine.generate(IDS, GREEDY)
    finally:
        let_go.set()
        killer.join()
        engine.close()


def test_a_sleep_that_fails_on_one_rank_ends_the_engine_instead_of_leaving_it_half_asleep(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ValueError("no memory is given back")

    monkeypatch.setattr(administration, "give_back", fail)
    with pytest.raises((EngineDead, RuntimeError), match="rank 0: ValueError"):
        work(checkpoints[0], 2)


# ---- refused ------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_divided_is_refused_before_any_process_starts(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match="3"):
        Engine(checkpoints[0], tp_size=3, **SETTINGS)
    with pytest.raises(ModelError, match="has 2 layers: --pp-size 3 leaves a stage without one"):
        Engine(checkpoints[0], pp_size=3, **SETTINGS)


def test_a_checkpoint_without_weights_is_refused_in_its_own_words(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"^\S* has no \*.safetensors"):
        Engine(path, tp_size=2, **SETTINGS)


# ---- the server ---------------------------------------------------------------------------------------------------


def test_a_server_ends_with_its_first_lost_rank(checkpoints: tuple[Path, Path]) -> None:
    with running(checkpoints[0], "--device", "cpu", "--threads", "1", "--no-events", "--tp-size", "2") as server:
        client = server.ready().client()
        body = {"model": "a", "prompt": "x", "max_tokens": 4, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200
        (rank,) = forked_ranks.processes()
        rank.kill()
        assert server.wait() == 1
        server.wait_for_log("the scheduler process failed: rank 1 was killed by SIGKILL")


def test_ranks_of_a_killed_scheduler_end(checkpoints: tuple[Path, Path]) -> None:
    with running(checkpoints[0], "--device", "cpu", "--threads", "1", "--no-events", "--tp-size", "2") as server:
        server.ready()
        (rank,) = forked_ranks.processes()
        os.kill(server.children()["scheduler"], signal.SIGKILL)
        eventually(lambda: gone(rank.pid), what="rank 1 ends")
        assert server.wait() == 1
