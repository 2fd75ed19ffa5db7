"""The order of a batch, and the prefixes that are cached before it."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lang_backend import FakeBackend
from treeline_lang import BackendError, assistant, function, gen, user
from treeline_lang.ordering import plan_batch, shared_length
from treeline_lang.templates import TEMPLATES


@function
def qa(s, document, question, shots=("One shot of many. " * 4,)):
    for shot in shots:
        s += "Example: " + shot
    s += user("Read: " + document + "\nQ: " + question)
    s += assistant(gen("answer", max_tokens=4))
    if len(s["answer"]) > 1:
        s += "done"


DOCUMENTS = [f"document {number} " * 100 for number in range(4)]
ITEMS = [{"document": DOCUMENTS[number % 4], "question": f"q{number:02}"} for number in range(16)]
OPENING = "Example: " + "One shot of many. " * 4 + "USER: Read: document "


def plan(program, items, backend, threads=4, **options):
    run = program.new_run(backend, program.split({})[1], **options)
    return list(plan_batch(program, [program.arguments((), item) for item in items], run, threads)[0])


def test_items_with_the_same_beginning_are_neighbours():
    order = plan(qa, ITEMS, FakeBackend())
    assert [number % 4 for number in order] == sorted(number % 4 for number in range(16))


def test_the_common_prefix_is_cached_before_the_first_request():
    backend = FakeBackend()
    states = qa.run_batch(ITEMS, backend=backend, num_threads=4)
    assert [state.error() for state in states] == [None] * 16
    assert backend.requests[0].kind == "warm"
    assert backend.texts("warm") == [OPENING]


def test_traced_prompts_equal_those_that_the_programs_send():
    backend = FakeBackend()
    qa.run_batch(ITEMS, backend=backend, num_threads=1)
    assert backend.texts("generate") == sorted(backend.texts("generate"))


def test_the_constant_beginning_extends_into_the_first_branch_of_a_fork():
    @function
    def forks(s, topic):
        s += "About "
        branches = s.fork(2)
        branches += topic
        branches += gen("x")

    backend = FakeBackend()
    assert list(plan(forks, [{"topic": topic} for topic in "cab"], backend)) == [1, 2, 0]


def test_a_formatted_argument_determines_the_order_alone():
    @function
    def formats(s, word, unused):
        s += f"Say {word}"
        s += gen("x")

    items = [{"word": word, "unused": str(number)} for number, word in enumerate("baab")]
    assert list(plan(formats, items, FakeBackend())) == [1, 2, 0, 3]


def test_a_program_that_cannot_be_traced_is_run_in_the_given_order():
    @function
    def counts(s, words):
        s += gen(str(len(words)))

    assert list(plan(counts, [{"words": ["b"]}, {"words": ["a"]}], FakeBackend())) == [0, 1]


def test_a_backend_without_a_template_leaves_the_given_order():
    class Silent(FakeBackend):
        async def template(self):
            raise BackendError("nobody there")

    assert list(plan(qa, ITEMS, Silent())) == list(range(16))


def test_a_beginning_that_cannot_be_cached_fails_no_item():
    backend = FakeBackend()
    backend.fails = lambda request: BackendError("no") if request.kind == "warm" else None
    states = qa.run_batch(ITEMS, backend=backend)
    assert [state.error() for state in states] == [None] * 16
    assert backend.texts("warm") == [OPENING]


@pytest.mark.parametrize("options", [{"hints": False}, {"num_threads": 1}, {"order": "given"}])
def test_nothing_is_cached_ahead_if_disabled_or_useless(options):
    backend = FakeBackend()
    qa.run_batch(ITEMS, backend=backend, **options)
    assert backend.texts("warm") == []
    assert len(backend.texts("generate")) == 16


def test_the_given_order_is_kept_where_asked_for():
    backend = FakeBackend()
    qa.run_batch(ITEMS, backend=backend, num_threads=1, order="given")
    assert [text.rpartition("q")[2][:2] for text in backend.texts("generate")] == [
        f"{number:02}" for number in range(16)
    ]


def test_tracing_a_batch_stops_at_the_first_request_and_keeps_the_arguments():
    seen = []

    @function
    def notes(s, log):
        log.append("before")
        s += gen("x")
        seen.append("after")

    log: list[str] = []
    notes.run_batch([{"log": log}, {"log": log}], backend=FakeBackend())
    assert (log, seen) == (["before"] * 2, ["after"] * 2)


def test_cache_sends_the_constant_beginning():
    backend = FakeBackend()
    opening = "Example: " + "One shot of many. " * 4 + TEMPLATES["plain"].begin("user", True) + "Read: "
    assert qa.cache(backend=backend) == opening
    assert qa.cache(backend=backend, document="D") == opening + "D\nQ: "
    assert qa.bind(document="D").cache(backend=backend, shots=()) == "USER: Read: D\nQ: "
    assert backend.texts("warm") == [opening, opening + "D\nQ: ", "USER: Read: D\nQ: "]
    assert backend.texts("generate") == []


def test_cache_of_a_program_without_a_constant_beginning_sends_nothing():
    backend = FakeBackend()
    assert function(lambda s, word: s.__iadd__(word)).cache(backend=backend) == ""
    assert backend.texts("warm") == []
    with pytest.raises(TypeError, match="no parameter 'wrod'"):
        qa.cache(backend=backend, wrod="x")


def common_prefix(texts):
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in alike)


@given(st.text("ab"), st.text("ab"))
def test_shared_length(one, other):
    assert shared_length(one, other) == len(common_prefix([one, other]))
