"""Requests in flight: outputs reach their readers, and closing ends unfinished requests, once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.gate import WINDOW_BYTES
from treeline_runtime.messages import (
    AbortReq,
    BatchTextOut,
    DetokenizeInit,
    FinishReason,
    GenerateReq,
    HeardReq,
    Reply,
    SamplingParams,
    SleepReq,
    TextOut,
)
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.limits import GENERATION_BYTES
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.tokenizer_manager import DpRank, NoReply, TokenizerManager, merge


class Sent(list[Any]):
    def send(self, message: msgspec.Struct) -> bool:
        self.append(message)
        return True


class World:
    def __init__(self) -> None:
        self.scheduler, self.detokenizer, self.answered = Sent(), Sent(), 0
        self.manager = TokenizerManager(Metrics("m"), [DpRank(self.scheduler, self.detokenizer)])

    def requests(self, *rids: str) -> list[GenerateReq]:
        return [GenerateReq(rid, [1], SamplingParams(stop=("x",))) for rid in rids]

    def sent(self, rid: str) -> list[str]:
        """Return the scheduler's ids for the client's name `rid`."""
        return [m.rid for m in self.scheduler if isinstance(m, GenerateReq) and m.rid.split("#")[0] == rid]

    def arrive(self, *outs: TextOut) -> None:
        """Deliver outputs. `outs` have the client's names; each goes to the newest request of its name."""
        self.manager.on_batch(BatchTextOut([msgspec.structs.replace(out, rid=self.sent(out.rid)[-1]) for out in outs]))

    def answer(self) -> bool:
        """Let the scheduler answer the oldest open question, if there is one."""
        questions = [m for m in self.scheduler if isinstance(m, HeardReq)]
        if len(questions) > self.answered:
            self.answered += 1
            self.manager.on_reply(Reply(questions[self.answered - 1].id))
            return True
        return False

    @property
    def aborted(self) -> list[str]:
        ids = [id for message in self.scheduler if isinstance(message, AbortReq) for id in message.rid]
        return [id.split("#")[0] for id in ids]


DONE = FinishReason("length")


async def test_the_detokenizer_gets_a_request_before_the_scheduler() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a"))
    (id,) = world.sent("a")
    assert world.detokenizer == [DetokenizeInit(id, ("x",))]
    assert [message.rid for message in world.scheduler] == [id]
    inflight.close()


async def test_outputs_of_one_turn_are_merged_and_kept_apart_by_index() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a", "b"))
    world.arrive(TextOut("a", "he", [1]), TextOut("b", "x", [9]), TextOut("a", "llo", [2], completion_tokens=2))
    outs = await inflight.next()
    assert [(index, out.text, out.token_ids) for index, out in outs] == [(0, "hello", [1, 2]), (1, "x", [9])]
    world.arrive(TextOut("a", "", [], DONE), TextOut("b", "", [], DONE))
    assert len(await inflight.next()) == 2
    assert await inflight.next() == []
    inflight.close()
    assert world.aborted == []


async def test_a_reader_of_whole_answers_is_woken_only_at_the_end() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a"))
    task = asyncio.create_task(inflight.next(whole=True))
    await asyncio.sleep(0)
    world.arrive(TextOut("a", "he", [1]))
    await asyncio.sleep(0)
    assert not task.done()
    world.arrive(TextOut("a", "llo", [2], DONE))
    ((_, out),) = await task
    assert out.text == "hello"
    inflight.close()


async def test_closing_aborts_unfinished_requests_once() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a", "b"))
    world.arrive(TextOut("a", "", [], DONE))
    for _ in range(3):
        inflight.close()
    assert world.aborted == ["b"]
    world.arrive(TextOut("b", "late", [1], FinishReason("abort")))
    assert await inflight.next() == []


async def test_closing_wakes_waiting_readers() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a"))
    task = asyncio.create_task(inflight.next())
    await asyncio.sleep(0)
    inflight.close()
    assert await task == []


async def test_an_id_in_flight_cannot_be_used_again() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a"), name="a")
    with pytest.raises(ApiError, match="already in flight"):
        world.manager.open(world.requests("a"))
    with pytest.raises(ApiError, match="already in flight"):
        world.manager.open(world.requests("c"), name="a")
    with pytest.raises(ApiError, match="already in flight"):
        world.manager.open(world.requests("d", "d"))
    inflight.close()
    world.manager.open(world.requests("a"), name="a").close()


async def test_aborting_a_name_ends_all_of_its_requests() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a:0", "a:1"), name="a")
    world.manager.abort("a")
    world.manager.abort("b")
    assert world.aborted == ["a:0", "a:1"]
    other = world.manager.open(world.requests("c"))
    world.manager.abort("")
    assert world.aborted[2:] == ["a:0", "a:1", "c"]
    world.manager.abort("a:1")
    assert world.aborted[5:] == ["a:1"]
    other.close()
    inflight.close()


async def test_each_tenant_has_its_own_names_and_an_abort_ends_all_of_one_name() -> None:
    world = World()
    opened = [world.manager.open(world.requests("a"), name="a", tenant=tenant) for tenant in (None, "ada", "bob")]
    with pytest.raises(ApiError, match="already in flight"):
        world.manager.open(world.requests("a"), tenant="ada")
    world.manager.abort("a")
    assert world.aborted == ["a", "a", "a"]
    opened[1].close()
    world.manager.open(world.requests("a"), name="a", tenant="ada").close()
    with pytest.raises(ApiError, match="already in flight"):
        world.manager.open(world.requests("a"), tenant="bob")
    for inflight in opened:
        inflight.close()


async def test_the_end_of_a_closed_request_does_not_end_its_namesake() -> None:
    world = World()
    world.manager.open(world.requests("a"), name="a").close()
    again = world.manager.open(world.requests("a"), name="a")
    old, new = world.sent("a")
    world.manager.on_batch(BatchTextOut([TextOut(old, "old", [1], FinishReason("abort"))]))
    world.manager.on_batch(BatchTextOut([TextOut(new, "new", [2], DONE)]))
    assert [out.text for _, out in await again.next()] == ["new"]
    assert [m.rid for m in world.scheduler if isinstance(m, AbortReq)] == [[old]]
    again.close()


MANY = 2 * WINDOW_BYTES // GENERATION_BYTES
"""Generations of which about half can be sent before the scheduler confirms any."""


def generations(world: World, client: str, count: int = MANY) -> list[GenerateReq]:
    return [GenerateReq(f"{client}{i}", [1], SamplingParams(), client=client) for i in range(count)]


@pytest.mark.parametrize("how", ["closed", "aborted", "all aborted", "failed"])
async def test_generations_waiting_for_their_turn_end_without_the_scheduler(how: str) -> None:
    world = World()
    inflight = world.manager.open(generations(world, "c"), name="c")
    sent = [m.rid for m in world.scheduler if isinstance(m, GenerateReq)]
    assert 0 < len(sent) < MANY
    match how:
        case "closed":
            inflight.close()
        case "failed":
            world.manager.fail_all(FinishReason("error", message="gone", status=503))
        case _:
            world.manager.abort("c" if how == "aborted" else "")
            told = await inflight.next()
            assert {out.finish and out.finish.type for _, out in told} == {"abort"}
            assert len(told) == MANY - len(sent)
    aborted = [m.rid for m in world.scheduler if isinstance(m, AbortReq)]
    assert aborted == ([] if how == "failed" else [sent]), "one message for all that it has"
    while world.answer():
        pass
    assert [m.rid for m in world.scheduler if isinstance(m, GenerateReq)] == sent
    inflight.close()
    world.manager.open(generations(world, "c", 1)).close()


async def test_an_operation_on_the_engine_comes_after_all_generations_before_it() -> None:
    world = World()
    inflight = world.manager.open(generations(world, "c"))
    asked = asyncio.create_task(world.manager.ask(world.manager.ranks[0], SleepReq, timeout_s=60))
    await asyncio.sleep(0)
    while world.answer():
        await asyncio.wait([asked], timeout=0)
    await asyncio.wait([asked], timeout=0)
    kinds = [type(m) for m in world.scheduler if not isinstance(m, HeardReq)]
    assert kinds == [GenerateReq] * MANY + [SleepReq]
    world.manager.on_reply(Reply(world.scheduler[-1].id))
    assert (await asked).ok
    inflight.close()


async def test_a_general_failure_reaches_every_reader() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a", "b"))
    asked = asyncio.create_task(world.manager.state(world.manager.ranks[0], "load"))
    await asyncio.sleep(0)
    world.arrive(TextOut("a", "hi", [1]))
    assert world.manager.fail_all(FinishReason("error", message="gone", status=503)) == 2
    outs = await inflight.next()
    assert [(out.text, out.finish and out.finish.message) for _, out in outs] == [
        ("hi", "gone"),
        ("", "gone"),
    ]
    with pytest.raises(NoReply, match="gone"):
        await asked
    inflight.close()
    assert world.aborted == []


async def test_questions_are_answered_or_time_out() -> None:
    world = World()
    asked = asyncio.create_task(world.manager.state(world.manager.ranks[0], "load"))
    await asyncio.sleep(0)
    world.manager.on_reply(Reply(world.scheduler[0].id, data={"x": 1}))
    assert await asked == {"x": 1}
    with pytest.raises(NoReply):
        await world.manager.state(world.manager.ranks[0], "load", timeout_s=0.01)
    world.manager.on_reply(Reply("unknown"))


async def test_counts_and_times_are_measured() -> None:
    world = World()
    inflight = world.manager.open(world.requests("a"))
    world.arrive(TextOut("a", "x", [1], prompt_tokens=10, cached_tokens=4, completion_tokens=1))
    world.arrive(TextOut("a", "y", [2, 3], DONE, prompt_tokens=10, cached_tokens=4, completion_tokens=3))
    inflight.close()
    shown = world.manager._metrics.render().decode()
    for name, value in {
        "prompt_tokens_total": 10,
        "cached_tokens_total": 4,
        "generation_tokens_total": 3,
        "num_requests_total": 1,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
    }.items():
        assert f'treeline:{name}{{model_name="m"}} {float(value)}' in shown


def test_merging_joins_lists_and_keeps_the_last_counts() -> None:
    first = TextOut("a", "x", [1], logprobs=[msgspec.Raw(b"1"), msgspec.Raw(b"2")])
    second = TextOut("a", "y", [2], DONE, completion_tokens=2, logprobs=[msgspec.Raw(b"3")])
    merged = merge([first, second])
    assert (merged.text, merged.token_ids, merged.finish, merged.completion_tokens) == ("xy", [1, 2], DONE, 2)
    assert b"".join(map(bytes, merged.logprobs)) == b"123"


class Unwalked(dict[str, Any]):
    """A dict that must not be iterated."""

    def __iter__(self) -> Any:
        raise AssertionError("it may have a hundred thousand entries")

    items = values = keys = __iter__


async def test_an_abort_does_not_scan_all_requests() -> None:
    world = World()
    opened = [world.manager.open(world.requests(rid), tenant=tenant) for rid in "ab" for tenant in (None, "ada")]
    world.manager._named = Unwalked(world.manager._named)
    world.manager.abort("a")
    world.manager.abort("nobody's")
    assert world.aborted == ["a", "a"]
    for inflight in opened:
        inflight.close()
    assert not len(world.manager._named)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=8))
def test_merging_keeps_withdrawals(changes: list[tuple[int, list[int]]]) -> None:
    """A reader ends with the same ids, whichever outputs are merged."""
    outs, ids = list[TextOut](), [100, 101, 102]
    for back, new in changes:
        back = min(back, len(ids))
        ids = ids[: len(ids) - back] + new
        outs.append(TextOut("a", "", new, withdrawn=back))
    for cut in range(1, len(outs) + 1):
        merged = [merge(outs[:cut]), *outs[cut:]]
        seen = [100, 101, 102]
        for out in merged:
            seen = seen[: len(seen) - out.withdrawn] + out.token_ids
        assert seen == ids


async def test_each_rank_gets_its_own_requests_and_aborts() -> None:
    ranks = [Sent(), Sent()]
    manager = TokenizerManager(Metrics("m", 2), [DpRank(scheduler, Sent()) for scheduler in ranks])

    def opened(rid: str, rank: int | None = None, count: int = 1) -> Any:
        rids = [f"{rid}:{index}" for index in range(count)]
        return manager.open([GenerateReq(rid, [1], SamplingParams()) for rid in rids], name=rid, rank=rank)

    def took() -> list[list[str]]:
        made = [[m.rid.split(":")[0] for m in rank if isinstance(m, GenerateReq)] for rank in ranks]
        for rank in ranks:
            rank.clear()
        return made

    big = opened("big", count=3)
    small = opened("small")
    assert took() == [["big"] * 3, ["small"]]
    named = opened("named", rank=0)
    opened("next").close()
    assert took() == [["named"], ["next"]], "one has four, the other one"
    assert [m.rid for m in ranks[1] if isinstance(m, AbortReq)] == []
    manager.abort("big")
    assert [len(m.rid) for m in ranks[0] if isinstance(m, AbortReq)] == [3]
    assert not ranks[1]
    manager.abort("")
    assert [len(m.rid) for m in ranks[0] if isinstance(m, AbortReq)] == [3, 4]
    assert [len(m.rid) for m in ranks[1] if isinstance(m, AbortReq)] == [1]
    manager.on_batch(BatchTextOut([TextOut(id, "", [], DONE) for id in big.ids]))
    assert [rank.running for rank in manager.ranks] == [1, 1]
    for inflight in (big, small, named):
        inflight.close()
    assert [rank.running for rank in manager.ranks] == [0, 0]
    took()
    for rid in "abcd":
        opened(rid).close()
    assert [sorted(rids) for rids in took()] == [["a", "c"], ["b", "d"]], "equally busy ranks take turns"


async def test_requests_to_one_rank_do_not_wait_for_another() -> None:
    ranks = [Sent(), Sent()]
    manager = TokenizerManager(Metrics("m", 2), [DpRank(scheduler, Sent()) for scheduler in ranks])
    large = [GenerateReq(f"r{i}", [1] * 60_000, SamplingParams()) for i in range(4)]
    full = manager.open(large, rank=0)
    assert sum(isinstance(m, GenerateReq) for m in ranks[0]) < 4, "it has not taken the first ones yet"
    other = manager.open([GenerateReq("other", [1], SamplingParams())], rank=1)
    assert sum(isinstance(m, GenerateReq) for m in ranks[1]) == 1
    full.close()
    other.close()
