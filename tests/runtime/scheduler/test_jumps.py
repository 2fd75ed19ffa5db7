"""Forced text is taken without sampling: the same answer in fewer steps, in all circumstances."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.runtime_grammars import WithGrammars, backend, bundle, compiled, vocabulary
from support.runtime_graphs import ComputedGraphs
from tokenizers import Tokenizer
from treeline_runtime.core import Req
from treeline_runtime.messages import AbortReq, FinishReason, Grammar, StopReq
from treeline_runtime.scheduler import executor
from treeline_runtime.scheduler.grammars import Jumps
from treeline_runtime.tokens import IncrementalDetokenizer

pytestmark = pytest.mark.deep

VOCAB = range(300, 4000)


def schema(**properties: Any) -> Grammar:
    source = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Grammar("json", json.dumps(source))


PERSON = schema(
    full_name={"type": "string", "maxLength": 8},
    age_in_years={"type": "integer", "minimum": 0, "maximum": 999},
    is_registered={"type": "boolean"},
    kind={"enum": ["alpha", "beta"]},
)
FLAGS = schema(**{name: {"type": "boolean"} for name in ("reads_books", "writes_books", "sells_books")})
COLOURS = Grammar("regex", r"The colour is (red|green|blue), and the size is (small|large|enormous)\.")
CHOICE = Grammar("choice", '["Zürich Hauptbahnhof", "Zürich Flughafen", "Bern"]')
LONG = Grammar("regex", "(yes|no): " + "the quick brown fox jumps over the lazy dog, " * 6 + "[0-9]{3} times")


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(VOCAB, k=length)


ASKED: dict[str, tuple[list[int], Grammar | None, dict[str, Any]]] = {
    "person": (prompt(1, 9), PERSON, {}),
    "free": (prompt(5, 12), None, {"max_new_tokens": 30, "ignore_eos": True}),
    "drawn person": (prompt(2, 43), PERSON, {"temperature": 1.0, "seed": 8}),
    "flags": (prompt(3, 21), FLAGS, {}),
    "drawn": (prompt(4, 7), None, {"max_new_tokens": 25, "temperature": 0.9, "seed": 4, "ignore_eos": True}),
    "colours": (prompt(6, 5), COLOURS, {"temperature": 1.2, "seed": 3}),
    "choice": (prompt(7, 17), CHOICE, {"frequency_penalty": 0.3}),
    "long": (prompt(8, 30), LONG, {}),
    "flags again": (prompt(3, 21) + prompt(9, 3), FLAGS, {"temperature": 1.0, "seed": 2}),
}
MOST = 260


def ask(engine: WithGrammars, rid: str, name: str | None = None, **options: Any) -> None:
    ids, grammar, own = ASKED[name or rid]
    engine.submit(rid, ids, **({"max_new_tokens": MOST, "grammar": grammar} | own | options))


def everybody(engine: WithGrammars, **options: Any) -> WithGrammars:
    for rid in ASKED:
        ask(engine, rid, **options)
    return engine


def answers(engine: WithGrammars) -> dict[str, list[int]]:
    return {rid: engine.tokens(rid) for rid in ASKED}


def engine_of(depth: int, **settings: Any) -> WithGrammars:
    return WithGrammars(overlap_depth=depth, **({"max_total_tokens": 4096, "chunked_prefill_size": 512} | settings))


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, list[int]]]:
    """The tokens of each request when it runs alone, by overlap depth: a jump is worth it for one saved step, or
    not."""
    found: dict[int, dict[str, list[int]]] = {0: {}, 1: {}}
    for depth, said in found.items():
        engine = engine_of(depth)
        for rid in ASKED:
            ask(engine, rid)
            engine.run()
            engine.cache.flush()
            said[rid] = engine.tokens(rid)
    return found


def obeys(rid: str, text: str) -> None:
    _, grammar, _ = ASKED[rid]
    if grammar is not None:
        matcher = compiled(grammar).matcher(sorted(vocabulary().stop_ids))
        for id in Tokenizer.from_str(bundle().tokenizer_json).encode(text).ids:
            assert matcher.accept(id), (rid, text)
        assert matcher.completed, (rid, text)


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks": {"chunked_prefill_size": 16, "max_running_requests": 4},
    "mixed chunks": {"chunked_prefill_size": 16, "mixed_chunk": True},
    "many prefills": {"chunked_prefill_size": 8, "prefills_in_a_row": 3},
    "pages of one": {"page_size": 1},
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_requests_get_the_same_tokens_together_as_alone(
    alone: dict[int, dict[str, list[int]]], name: str, depth: int
) -> None:
    engine = everybody(engine_of(depth, **SETTINGS[name]))
    engine.run()
    assert answers(engine) == alone[depth]
    assert engine.stats.total_jumps >= 10


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("largest", [16, 64])
def test_a_step_with_jumps_is_a_graph_of_all_their_tokens(
    alone: dict[int, dict[str, list[int]]], largest: int, depth: int
) -> None:
    engine = everybody(engine_of(depth))
    graphs = ComputedGraphs(engine.executor, largest)
    engine.executor._graphs = graphs  # type: ignore[assignment]
    engine.run()
    assert answers(engine) == alone[depth]
    assert graphs.of_several >= 2


def test_a_costly_jump_is_computed_like_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_READ_AGAIN_BYTES", 0)
    engine = everybody(engine_of(1))
    graphs = ComputedGraphs(engine.executor, 64)
    engine.executor._graphs = graphs  # type: ignore[assignment]
    engine.run()
    assert graphs.of_several == 0
    assert engine.stats.total_jumps >= 10
    for rid in ASKED:
        obeys(rid, engine.said(rid))
        assert engine.last(rid).completion_tokens == len(engine.tokens(rid))


@pytest.mark.parametrize("depth", [0, 1])
def test_jumps_take_fewer_steps(depth: int) -> None:
    on, off = engine_of(depth), engine_of(depth, jump_forward=False)
    for engine in (on, off):
        ask(engine, "long")
        engine.run()
    assert off.stats.total_jumps == 0
    assert off.steps > 60
    assert on.steps < 20
    assert on.last("long").completion_tokens - on.stats.total_forced_tokens < 20


# ---- what is computed ---------------------------------------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Record the indices of each request's sampled tokens, and of no forced ones."""
    found: dict[str, set[int]] = {}
    after = Jumps.after

    def watched(self: Jumps, req: Req) -> FinishReason | None:
        before = req.tokens[:]
        finish = after(self, req)
        if req.tokens != before:
            same = [a == b for a, b in zip(before, req.tokens, strict=False)]
            kept = same.index(False) if False in same else len(before)
            forced = {i for i in found.get(req.rid, set()) if i < kept}
            found[req.rid] = forced | set(range(kept, len(req.tokens)))
        return finish

    monkeypatch.setattr(Jumps, "after", watched)
    return found


def likeliest(engine: WithGrammars, grammar: Grammar, ids: list[int], output: list[int]) -> int:
    """Return the greedy token of an engine that computes prompt and output as a new prompt."""
    ends = sorted(vocabulary().stop_ids)
    matcher = compiled(grammar).matcher(ends)
    assert all(matcher.accept(token) for token in output)
    mask = torch.zeros(1, -(-len(vocabulary().texts) // 32), dtype=torch.int32)
    backend().fill([matcher], mask, [0])
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    bias = {int(i): -torch.inf for i in np.flatnonzero(bits[: len(vocabulary().texts)] == 0)}
    rid = f"likeliest {len(engine.outs)}"
    return engine.generate(rid, ids + output, max_new_tokens=1, logit_bias=bias)[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rid", ["person", "flags"])
def test_greedy_tokens_are_the_most_likely_after_this_sequence(
    sampled: dict[str, set[int]], rid: str, depth: int
) -> None:
    engine = engine_of(depth)
    ask(engine, rid)
    engine.run()
    ids, grammar, _ = ASKED[rid]
    assert grammar is not None
    output, forced = engine.tokens(rid), sampled[rid]
    chosen = [i for i in range(len(output)) if i + len(ids) not in forced]
    assert len(forced) > len(chosen) > 2
    fresh = engine_of(0)
    for i in chosen:
        assert output[i] == likeliest(fresh, grammar, ids, output[:i]), i


@pytest.mark.parametrize(("depth", "page_size"), [(0, 4), (1, 1)])
def test_the_cache_holds_the_computed_tokens(depth: int, page_size: int) -> None:
    """A request that continues an answer with jumps finds in the cache the tokens that it would have computed."""
    engine, fresh = engine_of(depth, page_size=page_size), engine_of(0)
    everybody(engine).run()
    for rid in ("person", "flags", "long", "flags again"):
        ids, _, _ = ASKED[rid]
        whole = ids + engine.tokens(rid)
        expected = fresh.generate(rid, whole, max_new_tokens=8, ignore_eos=True)
        fresh.cache.flush()
        assert engine.generate(rid + "?", whole, max_new_tokens=8, ignore_eos=True) == expected
        assert engine.last(rid + "?").cached_tokens > len(ids) - page_size
        ask(engine, rid + "!", rid)
        engine.run()
        assert engine.tokens(rid + "!") == engine.tokens(rid)


@pytest.mark.parametrize("depth", [0, 1])
def test_forced_tokens_are_those_of_the_tokenizer(depth: int) -> None:
    """The grammar leaves one choice at every token."""
    engine = engine_of(depth)
    grammar = Grammar("regex", '\\{"the_full_name": true, "the_age_in_years": 7, "is_registered": false\\} and so on')
    engine.submit("a", prompt(1, 6), grammar=grammar, max_new_tokens=100)
    engine.run()
    stops = vocabulary().stop_ids
    ids = [id for id in engine.tokens("a") if id not in stops]
    assert ids[:-3] == Tokenizer.from_str(bundle().tokenizer_json).encode(engine.said("a")).ids[: len(ids) - 3]


# ---- how it ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_every_length_limit_is_kept_with_jumps(depth: int) -> None:
    engine = engine_of(depth)
    ask(engine, "person")
    engine.run()
    whole = engine.said("person").encode()
    for most in range(1, 46, 2):
        rid = str(most)
        ask(engine, rid, "person", max_new_tokens=most)
        engine.run()
        assert len(engine.tokens(rid)) <= most
        finish = engine.finish(rid)
        assert engine.last(rid).completion_tokens == len(engine.tokens(rid))
        if finish.type == "length":
            assert len(engine.tokens(rid)) == most
        else:
            assert engine.said(rid).encode() == whole


def test_an_answer_forced_to_its_end_takes_few_steps() -> None:
    engine = engine_of(0)
    grammar = Grammar("choice", '["nothing else can be said of this by anybody"]')
    engine.submit("a", prompt(1, 9), grammar=grammar, max_new_tokens=50)
    engine.submit("short", prompt(2, 9), grammar=grammar, max_new_tokens=3)
    engine.run()
    assert engine.said("a") == "nothing else can be said of this by anybody"
    assert engine.steps < 12
    assert engine.last("short").finish == FinishReason("length")
    assert len(engine.tokens("short")) == 3


def test_a_stop_token_is_not_jumped_over() -> None:
    """The model samples the stop token or another one."""
    engine = engine_of(0)
    ask(engine, "flags")
    engine.run()
    output = engine.tokens("flags")
    for i, stop in enumerate(dict.fromkeys(output[:12])):
        ask(engine, str(i), "flags", stop_token_ids=(stop,))
        engine.run()
        finish = engine.finish(str(i))
        assert finish.type == "stop"
        assert stop not in engine.tokens(str(i))[:-1]
        assert (finish.matched == stop) == (engine.tokens(str(i))[-1] == stop)


def test_a_long_forced_word_is_not_examined_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, looked = engine_of(0), list[int]()
    forward = engine.grammars.jump_forward
    assert forward is not None
    jump = forward.jump

    def looking(tokens: list[int], fixed: int, forced: str, *_: str | None) -> Any:
        looked.append(len(forced))
        return jump(tokens, fixed, forced)

    monkeypatch.setattr(forward, "jump", looking)
    engine.submit("a", prompt(1, 5), grammar=Grammar("choice", json.dumps(["x" * 900])), max_new_tokens=60)
    engine.run()
    assert 1 < len(looked) < 10


@pytest.mark.parametrize("option", ["return_logprob", "return_hidden_states"])
def test_requests_for_logprobs_do_not_jump(option: str) -> None:
    engine = engine_of(1, enable_return_hidden_states=True)
    ask(engine, "a", "flags", **{option: True})
    engine.run()
    assert engine.stats.total_jumps == 0
    obeys("flags", engine.said("a"))


def test_the_grammar_may_begin_later() -> None:
    """Text before the grammar's marker is not replaced."""
    engine = engine_of(1)
    marked = msgspec.structs.replace(FLAGS, after="e")
    engine.submit("a", prompt(3, 9), grammar=marked, max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    engine.run()
    text = engine.said("a")
    before = text.index("e")
    start = text.index("{", before)
    obeys("flags", text[start:])
    assert engine.stats.total_jumps > 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("how", ["abort", "stop"])
def test_a_request_may_end_at_every_step(alone: dict[int, dict[str, list[int]]], depth: int, how: str) -> None:
    for point in range(1, 20, 6):
        engine = everybody(engine_of(depth, max_running_requests=6))
        for _ in range(point):
            engine.step()
        engine.inbox.append(AbortReq("person") if how == "abort" else StopReq("person", "x"))
        engine.run()
        for rid, tokens in alone[depth].items():
            if rid != "person":
                assert engine.tokens(rid) == tokens, f"{rid} at step {point}"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_launch_is_repeated_request_by_request(alone: dict[int, dict[str, list[int]]], depth: int) -> None:
    engine = everybody(engine_of(depth))
    engine.run_with_failing_launches()
    assert answers(engine) == alone[depth]


def test_a_failed_jump_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(1)
    assert engine.grammars.jump_forward is not None
    monkeypatch.setattr(engine.grammars, "jump_forward", object())
    ask(engine, "flags")
    engine.run()
    assert engine.stats.total_jumps == 0
    obeys("flags", engine.said("flags"))


# ---- messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("stop", [(), ("is_reg",), ("years",), ('ue, "',)])
def test_the_text_of_a_stream_is_exact(depth: int, stop: tuple[str, ...]) -> None:
    """It holds however the messages are merged."""
    tokenizer = Tokenizer.from_str(bundle().tokenizer_json)
    engine = engine_of(depth)
    for seed in range(12):
        ask(engine, str(seed), "drawn person", seed=seed, temperature=1.4)
    engine.run()
    assert any(out.withdrawn for outs in engine.outs.values() for out in outs), "nothing was replaced"
    for seed in range(12):
        whole: str = tokenizer.decode(engine.tokens(str(seed)), skip_special_tokens=True)
        ends = [whole.index(one) for one in stop if one in whole]
        detokenizer = IncrementalDetokenizer(tokenizer.decode, stop=stop)
        text, ids = "", list[int]()
        for out in engine.outs[str(seed)]:
            delta = detokenizer.push(out.token_ids, out.finish, withdrawn=out.withdrawn)
            text += delta.text
            assert whole.startswith(text)
            del ids[len(ids) - out.withdrawn :]
            ids += out.token_ids[: len(out.token_ids) - delta.unused]
            if delta.matched is not None:
                said = tokenizer.decode(ids)
                assert delta.matched in said
                assert delta.matched not in tokenizer.decode(ids[:-1])
                break
        assert text == whole[: min(ends, default=len(whole))]


# ---- everything at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_depth": 0, "page_size": 4, "max_total_tokens": 160},
        {"overlap_depth": 1, "page_size": 4, "max_total_tokens": 160, "prefills_in_a_row": 2},
        {"overlap_depth": 1, "page_size": 1, "max_total_tokens": 160, "mixed_chunk": True, "chunked_prefill_size": 16},
    ],
)
def test_random_traffic_keeps_every_invariant(settings: dict[str, Any]) -> None:
    """The accounts balance after every step; surviving requests obey their grammars."""
    rng = random.Random(1)
    engine = WithGrammars(**settings)
    asked: dict[str, str] = {}
    for _ in range(80):
        action = rng.random()
        if action < 0.5:
            rid, name = str(len(asked)), rng.choice(["person", "person", "colours", "free", "flags"])
            asked[rid] = name
            own = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.randint(0, 9), "ignore_eos": False}
            ask(engine, rid, name, max_new_tokens=64, **own)
        elif action < 0.55 and asked:
            engine.abort(rng.choice(list(asked)[-8:]))
        engine.ratio.value = 0.0
        engine.step()
    engine.run()
    assert engine.stats.total_jumps > 30
    assert any(engine.last(rid).retractions for rid in asked)
    for rid, name in asked.items():
        finish = engine.finish(rid)
        assert finish.type in ("stop", "abort", "length"), finish
        assert engine.last(rid).completion_tokens == len(engine.tokens(rid))
        if finish.type == "stop":
            obeys(name, engine.said(rid))
