"""A trace records a program; it refuses what it cannot know, with the line and the way to write it."""

from __future__ import annotations

import copy

import pytest
from support.lang_backend import FakeBackend
from treeline_lang import (
    Function,
    TraceError,
    assistant,
    function,
    gen,
    gen_int,
    image,
    select,
    separate_reasoning,
    user,
)
from treeline_lang.compiler.graph import (
    Append,
    Argument,
    Fork,
    Hole,
    Join,
    Joined,
    Parameter,
    SetVar,
    Variable,
)
from treeline_lang.expressions import Gen, RoleBegin, RoleEnd, Sum, Text


def body(act) -> Function:
    @function
    def traced(s, word, items=("x",)):
        return act(s, word, items)

    return traced


REFUSED = {
    "copied": (lambda s, word, items: len(copy.deepcopy(word)), "argument word is measured"),
    "f-string": (lambda s, word, items: s.__iadd__(f"Q: {word}"), "argument word is formatted"),
    "str": (lambda s, word, items: s.__iadd__(str(word)), "argument word is turned into a text"),
    "percent": (lambda s, word, items: s.__iadd__("%s" % word), "argument word is turned into a text"),  # noqa: UP031
    "format": (lambda s, word, items: s.__iadd__("{}".format(word)), "argument word is formatted"),  # noqa: UP032
    "join": (lambda s, word, items: s.__iadd__(" ".join([word])), "expected str instance"),
    "branch": (lambda s, word, items: s.__iadd__("a" if word else "b"), "argument word is branched on"),
    "compare": (lambda s, word, items: word == "a", "argument word is compared"),
    "order": (lambda s, word, items: word < "a", "argument word is compared"),
    "in": (lambda s, word, items: "a" in word, "argument word is searched"),
    "iterate": (lambda s, word, items: [s.__iadd__(item) for item in items], "argument items is iterated over"),
    "len": (lambda s, word, items: len(items[0]), r"argument items\[0\] is measured"),
    "int": (lambda s, word, items: int(word), "argument word is turned into a number"),
    "range": (lambda s, word, items: range(word), "argument word is turned into a number"),
    "arithmetic": (lambda s, word, items: word + 1, "argument word is added to a number"),
    "product": (lambda s, word, items: word * 2, "argument word is calculated with"),
    "slice": (lambda s, word, items: word[1:], "argument word is sliced"),
    "attribute": (lambda s, word, items: word.strip(), "argument word is asked for its strip"),
    "key": (lambda s, word, items: {"a": 1}[word], "argument word is looked up"),
    "sum": (lambda s, word, items: ("a" + word)[0], "a text with the argument word is sliced"),
    "fork": (lambda s, word, items: s.fork(word), "not <the argument word>"),
    "sampling": (lambda s, word, items: gen("x", max_tokens=word), "max_tokens is an integer"),
    "image": (lambda s, word, items: s.__iadd__(image(word)), "argument word is the source of image"),
    "scope": (lambda s, word, items: s.var_scope(word).__enter__(), "argument word is the name of var_scope"),
    "text of the state": (lambda s, word, items: s.text(), "the text, the messages and the error of a state"),
    "messages": (lambda s, word, items: s.messages(), "the text, the messages and the error of a state"),
    "error": (lambda s, word, items: s.error(), "the text, the messages and the error of a state"),
    "unknown variable": (lambda s, word, items: s["nothing"], "nothing sets the variable 'nothing'"),
}


def test_a_program_that_catches_a_refusal_of_a_copy_is_not_compiled():
    def swallows(s, word, items):
        try:
            s += str(len(copy.deepcopy(word)))
        except TraceError:
            s += word

    with pytest.raises(TraceError, match="argument word is measured"):
        body(swallows).trace()


@pytest.mark.parametrize(("act", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_operations_on_unknown_values_are_refused_with_their_line(act, reason):
    with pytest.raises(TraceError, match=reason) as refused:
        body(act).trace()
    assert refused.value.where is not None
    assert refused.value.where.file == __file__
    assert refused.value.where.line == act.__code__.co_firstlineno


def test_a_refusal_says_what_to_write_instead():
    with pytest.raises(TraceError) as refused:
        body(REFUSED["f-string"][0]).trace()
    assert '"…" + x + "…" in place of an f-string' in str(refused.value)
    assert "compile(word=…)" in str(refused.value)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda value: value == "yes", "the variable x is compared"),
        (lambda value: f"{value}", "the variable x is formatted"),
        (lambda value: [*value], "the variable x is iterated over"),
    ],
)
def test_variables_are_known_once_the_model_has_written_them(act, reason):
    @function
    def reads(s):
        s += gen("x")
        return act(s["x"])

    with pytest.raises(TraceError, match=f"{reason}.*is not compiled but run"):
        reads.trace()


def test_meta_data_and_streams_are_unknown_while_tracing():
    with pytest.raises(TraceError, match="what the backend says with 'x'"):
        function(lambda s: [s.__iadd__(gen("x")), s.get_meta_info("x")]).trace()
    with pytest.raises(TraceError, match="the pieces of 'x'"):
        function(lambda s: [s.__iadd__(gen("x")), list(s.text_iter("x"))]).trace()


def test_a_refusal_counts_even_if_the_program_catches_it():
    @function
    def catches(s, word):
        try:
            s += "Q: " + word.upper()
        except Exception:
            s += "no word"

    with pytest.raises(TraceError, match="asked for its upper"):
        catches.trace()


def test_errors_of_the_program_have_its_line():
    @function
    def fails(s, word):
        s += word
        raise RuntimeError("broken")

    with pytest.raises(TraceError, match="RuntimeError: broken") as refused:
        fails.trace()
    assert refused.value.where.function == "fails"


def test_texts_arguments_and_model_calls_are_recorded_with_their_lines():
    @function
    def qa(s, question, shots):
        s += user("Q: " + question + "\n" + shots["few"][0])
        s += assistant(gen("answer", max_tokens=4))
        return s["answer"]

    graph = qa.trace()
    assert graph.parameters == (Parameter("question"), Parameter("shots"))
    asked, answered = graph.of(0)
    assert asked == Append(
        (
            RoleBegin("user"),
            Text("Q: "),
            Hole(Argument("question"), text=True),
            Text("\n"),
            Hole(Argument("shots", ("few", 0)), text=True),
            RoleEnd("user"),
        )
    )
    assert isinstance(answered.parts[1], Gen)
    assert graph.returns == Variable(0, "answer")
    assert asked.where.line + 1 == answered.where.line == answered.parts[1].where.line


def test_an_argument_may_be_a_number_alone_but_not_in_a_sum():
    @function
    def bare(s, n):
        s += n
        s += "a" + n
        s += gen("x") + n

    parts = [step.parts[-1] for step in bare.trace().of(0)]
    assert [part.text for part in parts] == [False, True, False]


def test_forks_joins_and_their_variables_are_recorded():
    @function
    def judge(s):
        forks = s.fork(2)
        forks += gen("verdict")
        forks.join()
        for number, verdict in enumerate(s["verdict"]):
            s += f"{number}: " + verdict
        with s.copy() as copied:
            copied += gen("extra")
        s.set_var("both", {"all": (s["verdict"], s["extra"][0] + "!")})
        return s["both"]["all"][0][1]

    graph = judge.trace()
    steps = graph.of(0)
    assert steps[:2] == (Fork((1, 2)), Join((1, 2)))
    first, second = Variable(1, "verdict"), Variable(2, "verdict")
    assert [step.parts for step in steps[2:4]] == [
        (Text("0: "), Hole(first, text=True)),
        (Text("1: "), Hole(second, text=True)),
    ]
    both = {"all": ([first, second], Joined((Variable(3, "extra"), "!")))}
    assert steps[-1] == SetVar("both", both)
    assert graph.returns == second


def test_a_reassigned_variable_is_a_new_one():
    @function
    def twice(s):
        s += gen("x")
        before = s["x"]
        s += gen("x", n=2)
        return [before, s["x"]]

    assert twice.trace().returns == [
        Variable(0, "x"),
        [Variable(0, "x", 1, (0,)), Variable(0, "x", 1, (1,))],
    ]


def test_choices_and_reasoning_accept_unknown_values():
    @function
    def chooses(s, word):
        s += select("pick", ["yes", word, "no " + word])
        s += separate_reasoning("Think of " + word + gen("idea"))
        return s["idea_reasoning_content"]

    pick, idea = (step.parts[0] for step in chooses.trace().of(0))
    hole = Hole(Argument("word"), text=True)
    assert pick.choices == ("yes", Sum((Hole(Argument("word")),)), Sum((Text("no "), hole)))
    assert idea.expr.parts[:2] == (Text("Think of "), hole)


def test_called_programs_are_recorded_inline_with_the_state_and_as_streams_without():
    @function
    def inner(s, word):
        s += "Inner " + word + gen("x")
        return s["x"]

    @function
    def outer(s, word):
        told = inner(s, word).ret_value
        beside = inner(word=told, temperature=0.5)
        return [told, beside["x"], beside]

    graph = outer.trace()
    [(stream, sampling)] = graph.called
    assert (stream, sampling.temperature) == (1, 0.5)
    assert graph.of(1)[0].parts[1] == Hole(Variable(0, "x"), text=True)


def test_constants_must_be_given_and_switches_have_defaults():
    @function
    def switches(s, word, times=1, loud=False, hint=None):
        for _ in range(times):
            s += word
        if hint is not None:
            s += hint
        s += "!" if loud else "."

    with pytest.raises(TraceError, match="times"):
        switches.trace()
    graph = switches.trace(times=2)
    assert [parameter.name for parameter in graph.parameters] == ["word"]
    assert len(graph.of(0)) == 3
    assert len(switches.trace(times=2, hint="psst").of(0)) == 4
    assert switches.bind(loud=True, times=0).trace().of(0) == (Append((Text("!"),)),)
    with pytest.raises(TypeError, match="no parameter 'tmies'"):
        switches.trace(tmies=2)


def test_a_branch_ends_at_its_join():
    @function
    def goes_on(s):
        forks = s.fork(2)
        forks.join()
        forks[0].__iadd__("more")

    with pytest.raises(TraceError, match="a branch goes on after its join"):
        goes_on.trace()


def test_tracing_asks_no_backend():
    backend = FakeBackend()

    @function
    def asks(s, word):
        s += word + gen_int("x")

    asks.trace()
    asks.compile().run(word="a", backend=backend).sync()
    assert len(backend.requests) == 1
