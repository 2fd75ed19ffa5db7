"""Requests with grammars wait while theirs is compiled, obey it, and end in every way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.runtime_engine import Harness
from tokenizers import Tokenizer
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.compiler import GrammarBudgetError
from treeline_runtime.messages import Grammar, StopReq

pytestmark = pytest.mark.deep

TINY = Path(__file__).parents[3] / "models" / "tiny"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
PROMPT = TOKENIZER.encode("The capital of France is").ids
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = Grammar("json", json.dumps(SCHEMA))
DIGITS = Grammar("regex", "[0-9]{3}-[a-z]+")
WORDS = Grammar("regex", "([a-z]{2,9} ){30}")
CITY = Grammar("choice", '["Paris", "Paris, Texas", "London"]')


class Speaking(Harness):
    def __init__(self, **settings: Any) -> None:
        super().__init__(TINY, **({"load_format": "auto", "max_total_tokens": 2048, "page_size": 16} | settings))

    def text(self, rid: str) -> str:
        return TOKENIZER.decode(self.tokens(rid))

    def say(self, rid: str, grammar: Grammar | None, **options: Any) -> str:
        self.generate(rid, PROMPT, grammar=grammar, **({"max_new_tokens": 64} | options))
        return self.text(rid)

    def refusal(self, rid: str) -> tuple[int | None, str | None]:
        finish = self.finish(rid)
        assert finish.type == "error"
        return finish.status, finish.message


@pytest.fixture
def engine() -> Iterator[Speaking]:
    made = Speaking()
    yield made
    made.grammars.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_obey_their_grammars(depth: int) -> None:
    engine = Speaking(overlap_depth=depth)
    for seed in range(8):
        options = {"grammar": (OBJECT, DIGITS, CITY)[seed % 3], "max_new_tokens": 64, "temperature": 1.5, "seed": seed}
        engine.submit(str(seed), PROMPT, **options)
    engine.submit("free", PROMPT, max_new_tokens=8)
    engine.run()
    engine.grammars.close()
    for seed in range(8):
        text = engine.text(str(seed))
        if seed % 3 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif seed % 3 == 1:
            assert re.fullmatch(DIGITS.source, text)
        else:
            assert text in json.loads(CITY.source)
    alone = Speaking()
    assert alone.generate("free", PROMPT, max_new_tokens=8) == engine.tokens("free")


LATE = Grammar("regex", "(([a-c]{1,99}){1,99}){1,99}" + "#" * 99)
"""A grammar that no backend can follow for long."""


def test_a_grammar_too_costly_late_is_a_client_error_and_not_retried_forever(engine: Speaking) -> None:
    """For a while nothing is computed for it, and other requests with the grammar end with it."""
    for rid in "ab":
        engine.submit(rid, PROMPT, grammar=LATE, max_new_tokens=400)
    engine.submit("free", PROMPT, max_new_tokens=30, ignore_eos=True)
    engine.run()
    for rid in "ab":
        status, message = engine.refusal(rid)
        assert (status, len(engine.tokens(rid)) > 5) == (400, True)
        assert message is not None
        assert re.fullmatch("a token of this grammar takes too much work after .*: make it simpler", message)
    assert len(engine.tokens("free")) == 30
    engine.submit("e", PROMPT, grammar=LATE)
    engine.run()
    assert engine.refusal("e") == engine.refusal("b")
    assert engine.tokens("e") == []
    engine.check_integrity()


def test_unconstrained_requests_do_not_wait_for_constrained_ones(engine: Speaking) -> None:
    engine.submit("bound", PROMPT, grammar=OBJECT, max_new_tokens=64)
    engine.submit("free", PROMPT, max_new_tokens=4, ignore_eos=True)
    engine.step()
    assert not engine.is_idle
    assert engine.load().waiting == 1
    for _ in range(4):
        engine.step()
    assert engine.last("free").finish is not None
    engine.run()
    jsonschema.validate(json.loads(engine.text("bound")), SCHEMA)


def test_a_known_grammar_starts_at_once(engine: Speaking) -> None:
    engine.say("first", OBJECT)
    engine.submit("second", PROMPT, grammar=OBJECT, max_new_tokens=64)
    engine.step()
    assert "second" in engine.decode.running
    engine.run()
    assert engine.text("second") == engine.text("first")


def test_a_bad_grammar_is_an_error_of_its_own_request_only(engine: Speaking) -> None:
    engine.submit("bad", PROMPT, grammar=Grammar("regex", "(a"))
    engine.submit("good", PROMPT, grammar=CITY, max_new_tokens=16)
    engine.run()
    status, message = engine.refusal("bad")
    assert status == 400
    assert message is not None
    assert "missing ), unterminated subpattern" in message
    assert engine.text("good") in json.loads(CITY.source)


def test_a_cached_refusal_keeps_no_requests_alive(engine: Speaking) -> None:
    bad = Grammar("regex", "(a")
    for i in range(3):
        engine.submit(f"bad{i}", PROMPT, grammar=bad)
        engine.run()
        assert engine.refusal(f"bad{i}")[0] == 400
    error = engine.grammars._compiler.get(bad).exception()
    assert error is not None
    assert error.__traceback__ is None


def test_a_request_that_leaves_during_compilation_is_gone(engine: Speaking) -> None:
    engine.submit("aborted", PROMPT, grammar=OBJECT)
    engine.submit("stopped", PROMPT, grammar=OBJECT)
    engine.submit("stays", PROMPT, grammar=OBJECT, max_new_tokens=64)
    engine.step()
    engine.abort("aborted")
    engine.inbox.append(StopReq("stopped"))
    engine.run()
    for rid, kind in (("aborted", "abort"), ("stopped", "stop")):
        finish = engine.finish(rid)
        assert finish.type == kind
        assert engine.tokens(rid) == []
    jsonschema.validate(json.loads(engine.text("stays")), SCHEMA)


def test_a_grammar_is_abandoned_with_its_last_waiting_request(engine: Speaking) -> None:
    given_up = list[Grammar]()
    compiling: dict[Grammar, Future[Compiled]] = {OBJECT: Future(), CITY: Future()}
    engine.grammars._compiler.get = lambda grammar, *_: compiling[grammar]  # type: ignore[method-assign]
    engine.grammars._compiler.forget = lambda grammar, *_: given_up.append(grammar)  # type: ignore[method-assign]
    for rid, grammar in (("one", OBJECT), ("two", OBJECT), ("other", CITY)):
        engine.submit(rid, PROMPT, grammar=grammar)
    engine.step()
    engine.abort("one")
    engine.abort("nobody")
    engine.step()
    assert given_up == []
    engine.abort("two")
    engine.step()
    assert given_up == [OBJECT]
    compiling[CITY].set_exception(GrammarError("it is wrong"))
    engine.run()
    assert engine.refusal("other") == (400, "it is wrong")
    assert given_up == [OBJECT]
    assert not engine.grammars._wanted


def test_a_request_waits_for_its_grammar() -> None:
    now = [0.0]
    engine = Speaking(waiting_timeout=5.0, clock=lambda: now[0])
    compiling = Future[Compiled]()
    engine.grammars._compiler.get = lambda *_: compiling  # type: ignore[method-assign]
    engine.submit("late", PROMPT, grammar=OBJECT)
    engine.step()
    now[0] = 4.9
    engine.step()
    assert engine.grammars.find("late")
    now[0] = 5.0
    engine.step()
    assert engine.refusal("late")[0] == 503
    engine.grammars.close()


@pytest.mark.parametrize("compiled_first", [False, True])
def test_the_queue_limit_includes_requests_waiting_for_grammars(compiled_first: bool) -> None:
    engine = Speaking(max_running_requests=1, max_queued_requests=2)
    if compiled_first:
        engine.say("warm", CITY)
    for i in range(6):
        engine.submit(str(i), PROMPT, grammar=CITY, max_new_tokens=16)
    engine.step()
    assert [rid for rid in map(str, range(6)) if rid in engine.outs and engine.last(rid).finish] == ["3", "4", "5"]
    engine.run()
    engine.grammars.close()
    for rid in "345":
        assert engine.refusal(rid)[0] == 503
    for rid in "012":
        assert engine.text(rid) in json.loads(CITY.source)


def test_one_clients_grammars_leave_room_for_anothers() -> None:
    engine = Speaking(max_running_requests=1, max_queued_requests=2)
    get, asked = engine.grammars._compiler.get, list[tuple[Any, ...]]()

    def held(grammar: Grammar, *whose: str | None) -> Future[Compiled]:
        asked.append(whose)
        return get(grammar, *whose) if whose[1] == "bob" else Future()

    engine.grammars._compiler.get = held  # type: ignore[method-assign]
    for i in range(4):
        engine.submit(f"ada {i}", PROMPT, grammar=CITY, max_new_tokens=16, client="ada", namespace="of ada")
    engine.submit("bob", PROMPT, grammar=CITY, max_new_tokens=16, client="bob", namespace="of bob")
    engine.step()
    assert engine.refusal("ada 3")[0] == 503
    assert asked == [("of ada", "ada")] * 3 + [("of bob", "bob")]
    engine.grammars._compiler.get(CITY, "of bob", "bob").result(60)
    for _ in range(40):
        engine.step()
    assert engine.text("bob") in json.loads(CITY.source)
    engine.grammars.close()


def test_a_client_without_seconds_left_gets_429(engine: Speaking) -> None:
    spent = Future[Compiled]()
    spent.set_exception(GrammarBudgetError("try again in 7 s"))
    engine.grammars._compiler.get = lambda *_: spent  # type: ignore[method-assign]
    engine.submit("late", PROMPT, grammar=OBJECT)
    engine.run()
    assert engine.refusal("late") == (429, "try again in 7 s")


def test_unconstrained_requests_pass_while_the_grammar_queue_is_full() -> None:
    engine = Speaking(max_running_requests=1, max_queued_requests=1)
    made = engine.grammars._compiler.get(OBJECT)
    compiling = Future[Compiled]()
    engine.grammars._compiler.get = lambda *_: compiling  # type: ignore[method-assign]
    for rid in ("bound", "bound too"):
        engine.submit(rid, PROMPT, grammar=OBJECT)
    engine.step()
    engine.submit("runs", PROMPT, max_new_tokens=4, ignore_eos=True)
    engine.step()
    for rid in ("waits", "is one too many"):
        engine.submit(rid, PROMPT, max_new_tokens=4, ignore_eos=True)
    engine.step()
    compiling.set_result(made.result(60))
    engine.step()
    for rid in ("is one too many", "bound", "bound too"):
        assert engine.refusal(rid) == (503, "the queue is full: 1 requests wait")
    engine.run()
    engine.grammars.close()
    for rid in ("runs", "waits"):
        assert len(engine.tokens(rid)) == 4


def test_a_limit_on_the_whole_counts_the_compilation() -> None:
    now = [0.0]
    engine = Speaking(request_timeout=5.0, clock=lambda: now[0])
    engine.submit("late", PROMPT, grammar=OBJECT)
    engine.step()
    now[0] = 6.0
    engine.run()
    engine.grammars.close()
    assert engine.refusal("late")[0] == 504


def test_a_model_without_a_tokenizer_follows_no_grammar(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.generate("bound", [1, 2, 3], grammar=CITY)
    engine.grammars.close()
    finish = engine.finish("bound")
    assert finish.status == 400
    assert finish.message is not None
    assert "does not support grammars" in finish.message


def test_retracted_requests_continue_where_they_were() -> None:
    """Twelve requests need more pages than there are."""
    calm, tight = Speaking(), Speaking(max_total_tokens=88, page_size=4)
    rids = [str(i) for i in range(12)]
    for engine in (calm, tight):
        for i, rid in enumerate(rids):
            prompt = PROMPT[i % 5 :]  # no two share pages
            engine.submit(rid, prompt, grammar=WORDS, max_new_tokens=40, temperature=1.0, seed=i)
        while not engine.outs.keys() >= set(rids) or any(engine.last(rid).finish is None for rid in rids):
            engine.ratio.value = 0.0  # optimistic: more are admitted than can stay
            if not engine.step():
                engine.run()
        engine.grammars.close()
    assert any(tight.last(rid).retractions for rid in rids)
    assert [tight.tokens(rid) for rid in rids] == [calm.tokens(rid) for rid in rids]


def test_a_grammar_begins_after_its_marker(engine: Speaking) -> None:
    text = engine.say("thinks", Grammar("json", OBJECT.source, after=" Paris"))
    thought, _, answer = text.partition(" Paris")
    assert answer
    jsonschema.validate(json.loads(answer), SCHEMA)
    assert "{" not in thought


def test_the_grammar_decides_the_end(engine: Speaking) -> None:
    """`ignore_eos` does not extend beyond the grammar."""
    assert engine.say("endless", CITY, ignore_eos=True) in json.loads(CITY.source)


def test_special_tokens_are_not_text(engine: Speaking) -> None:
    """Any text obeys, and none contains the model's markup."""
    engine.generate("any", PROMPT, grammar=Grammar("regex", "[^\\n]{40}"), temperature=5.0, seed=3, max_new_tokens=64)
    ids = engine.tokens("any")
    assert len(TOKENIZER.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")) <= 40 + len("<|endoftext|>")
    assert not {4094} & set(ids)
