"""Requests with grammars: they wait while theirs is compiled, obey it, and end however they end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.runtime_engine import Harness
from tokenizers import Tokenizer
from treeline_runtime.messages import Grammar, StopReq

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
        finish = self.last(rid).finish
        assert finish is not None
        assert finish.type == "error"
        return finish.status, finish.message


@pytest.fixture
def engine() -> Iterator[Speaking]:
    made = Speaking()
    yield made
    made.grammars.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_obey(depth: int) -> None:
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


def test_who_is_free_does_not_wait_for_who_is_not(engine: Speaking) -> None:
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


def test_what_is_known_is_begun_at_once(engine: Speaking) -> None:
    engine.say("first", OBJECT)
    engine.submit("second", PROMPT, grammar=OBJECT, max_new_tokens=64)
    engine.step()
    assert "second" in engine.decode.running
    engine.run()
    assert engine.text("second") == engine.text("first")


def test_a_bad_grammar_is_the_clients_fault_and_nobody_elses(engine: Speaking) -> None:
    engine.submit("bad", PROMPT, grammar=Grammar("regex", "(a"))
    engine.submit("good", PROMPT, grammar=CITY, max_new_tokens=16)
    engine.run()
    status, message = engine.refusal("bad")
    assert status == 400
    assert message is not None
    assert "missing ), unterminated subpattern" in message
    assert engine.text("good") in json.loads(CITY.source)


def test_a_refusal_that_is_kept_holds_none_of_the_requests_that_got_it(engine: Speaking) -> None:
    bad = Grammar("regex", "(a")
    for i in range(3):
        engine.submit(f"bad{i}", PROMPT, grammar=bad)
        engine.run()
        assert engine.refusal(f"bad{i}")[0] == 400
    error = engine.grammars._compiler.get(bad).exception()
    assert error is not None
    assert error.__traceback__ is None


def test_who_leaves_while_its_grammar_is_compiled_is_gone(engine: Speaking) -> None:
    engine.submit("aborted", PROMPT, grammar=OBJECT)
    engine.submit("stopped", PROMPT, grammar=OBJECT)
    engine.submit("stays", PROMPT, grammar=OBJECT, max_new_tokens=64)
    engine.step()
    engine.abort("aborted")
    engine.inbox.append(StopReq("stopped"))
    engine.run()
    for rid, kind in (("aborted", "abort"), ("stopped", "stop")):
        finish = engine.last(rid).finish
        assert finish is not None
        assert finish.type == kind
        assert engine.tokens(rid) == []
    jsonschema.validate(json.loads(engine.text("stays")), SCHEMA)


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
    finish = engine.last("bound").finish
    assert finish is not None
    assert finish.status == 400
    assert finish.message is not None
    assert "cannot follow grammars" in finish.message


def test_the_retracted_go_on_where_they_were() -> None:
    """Twelve that need more pages than there are."""
    calm, tight = Speaking(), Speaking(max_total_tokens=88, page_size=4)
    rids = [str(i) for i in range(12)]
    for engine in (calm, tight):
        for i, rid in enumerate(rids):
            prompt = PROMPT[i % 5 :]  # nobody shares another's pages
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


def test_the_end_is_the_grammars(engine: Speaking) -> None:
    """min_tokens holds as long as there is something to say; ignore_eos does not go beyond the grammar."""
    assert engine.say("short", CITY, min_new_tokens=40) in json.loads(CITY.source)
    finish = engine.last("short").finish
    assert finish is not None
    assert finish.type == "stop"
    assert engine.say("long", Grammar("regex", "[ab]*"), min_new_tokens=40, temperature=1.0, seed=1)[39:]
    assert engine.say("endless", CITY, ignore_eos=True) in json.loads(CITY.source)


def test_special_tokens_are_no_text(engine: Speaking) -> None:
    """Any text obeys, and none of the model's markup is in it."""
    engine.generate("any", PROMPT, grammar=Grammar("regex", "[^\\n]{40}"), temperature=5.0, seed=3, max_new_tokens=64)
    ids = engine.tokens("any")
    assert len(TOKENIZER.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")) <= 40 + len("<|endoftext|>")
    assert not {4094} & set(ids)
