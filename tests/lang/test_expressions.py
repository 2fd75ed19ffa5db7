"""Expressions that programs append; arguments are checked where they are written."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lang_backend import FakeBackend
from treeline_lang import (
    Unsupported,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    gen_int,
    gen_string,
    select,
    separate_reasoning,
    user,
    video,
)
from treeline_lang.expressions import Gen, Select, Sum, Text, as_expr, flatten, names_of
from treeline_lang.reasoning import MARKS, split_reasoning
from treeline_lang.sampling import MAX_NEW_TOKENS, Sampling, check_sampling

PIECES = st.one_of(st.text(), st.integers(), st.booleans(), st.builds(gen, st.sampled_from("abc")))


@given(st.lists(PIECES, min_size=2, max_size=8))
def test_sums_are_flat_and_in_order_however_they_were_added(pieces: list[Any]) -> None:
    exprs = [as_expr(piece) for piece in pieces]
    left = reduce(operator.add, exprs)
    right = reduce(lambda later, earlier: earlier + later, reversed(exprs))
    assert left == right == Sum(tuple(exprs))
    assert flatten(left) == tuple(exprs)
    assert names_of(left) == tuple(one.name for one in exprs if isinstance(one, Gen))


def test_texts_and_numbers_are_added_from_both_sides() -> None:
    assert flatten("a" + gen("x") + 3) == (Text("a"), gen("x"), Text("3"))
    assert names_of(user("q" + gen("x")) + separate_reasoning(gen("y"))) == ("x", "y", "y_reasoning_content")
    assert flatten(user("a")) == flatten(as_expr("") + user("a"))[1:]
    assert names_of(assistant_begin() + gen("z") + assistant_end() + assistant("b")) == ("z",)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: as_expr(None), "None was appended"),
        (lambda: as_expr([]), "list cannot be appended"),
        (lambda: "a" + gen("x") + None, "None was appended"),
        (lambda: user(), "needs its content"),
        (lambda: gen(""), "name of a variable"),
        (lambda: gen(3), "name of a variable"),
        (lambda: gen("x", choices=["a"], regex="a"), "two constraints"),
        (lambda: gen("x", choices_method="token_length_normalized"), "there are none"),
        (lambda: gen("x", regex="a", json_schema={}), "several constraints"),
        (lambda: gen("x", dtype=int, regex="a"), "several constraints"),
        (lambda: gen("x", dtype=list), "dtype is int"),
        (lambda: gen("x", regex="("), "the regex"),
        (lambda: gen("x", stop_regex=["a", "["]), "the regex"),
        (lambda: gen("x", regex=3), "a regex is a string"),
        (lambda: gen("x", stop=["a", ""]), "empty text"),
        (lambda: gen("x", stop=3), "stop is a list of str"),
        (lambda: gen("x", stop_token_ids=["a"]), "stop_token_ids is a list of int"),
        (lambda: gen("x", json_schema="{"), "not JSON"),
        (lambda: gen("x", json_schema=3), "json_schema is an object"),
        (lambda: gen("x", temperature=-1), "temperature is between"),
        (lambda: gen("x", temperature=float("nan")), "temperature is between"),
        (lambda: gen("x", temperature="hot"), "temperature is a number"),
        (lambda: gen("x", max_tokens=1.5), "max_tokens is an integer"),
        (lambda: gen("x", max_tokens=True), "max_tokens is an integer"),
        (lambda: gen("x", min_tokens=3, max_tokens=2), "above max_tokens"),
        (lambda: gen("x", n=0), "n is between"),
        (lambda: gen("x", ignore_eos=1), "ignore_eos is True or False"),
        (lambda: gen_int("x", regex="a"), "several constraints"),
        (lambda: select("x", []), "one text or more"),
        (lambda: select("x", "abc"), "one text or more"),
        (lambda: select("x", ["a", ""]), "not empty"),
        (lambda: select("x", ["a"], temperature=1.0), "no temperature but 0"),
        (lambda: select("x", ["a"], choices_method="best"), "choices_method is one of"),
        (lambda: separate_reasoning(select("x", ["a"])), "only these can contain reasoning"),
        (lambda: separate_reasoning(gen_int("x")), "only these can contain reasoning"),
        (lambda: separate_reasoning(gen("x"), "gpt"), "model_type is one of"),
        (lambda: check_sampling(max_tokens=1, max_new_tokens=2), "mean the same"),
        (lambda: check_sampling(heat=1), "there is no parameter 'heat'"),
    ],
)
def test_an_invalid_argument_is_refused_where_it_is_written(wrong: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        wrong()


@pytest.mark.parametrize("name", ["", 5, None, ["a"]])
def test_a_name_that_is_no_text_is_refused_where_it_is_written(name: Any) -> None:
    for act in (lambda s: s.set_var(name, 1), lambda s: s.var_scope(name).__enter__()):
        with pytest.raises(TypeError, match="the name of a variable is a text"):
            function(act).run(backend=FakeBackend())


def test_gen_with_choices_is_a_select() -> None:
    made = gen("x", choices=["a", "b"], choices_method="greedy_token_selection")
    assert isinstance(made, Select)
    assert (made.choices, made.method.name) == (("a", "b"), "greedy_token_selection")


def test_an_expression_has_its_line_which_equality_ignores() -> None:
    one, other = gen("x"), gen("x")
    assert one == other
    assert isinstance(one, Gen)
    assert isinstance(other, Gen)
    assert str(one.where).startswith("test_expressions.py:")
    assert one.where == other.where
    assert one.where != gen("y").where  # type: ignore[attr-defined]


# ---- sampling ---------------------------------------------------------------------------------------------------


def test_a_gens_sampling_overrides_the_runs_and_stops_of_both_count() -> None:
    mine = check_sampling(temperature=0.0, stop="a", max_tokens=0)
    run = check_sampling(temperature=1.0, top_p=0.5, stop=["b", "a"], max_new_tokens=9)
    both = mine.over(run)
    assert (both.temperature, both.top_p, both.stop, both.limit) == (0.0, 0.5, ("a", "b"), 0)
    assert Sampling().limit == MAX_NEW_TOKENS
    assert mine.over(Sampling()) == mine
    assert Sampling().over(run) == run


def test_schemas_may_be_mappings_json_or_models() -> None:
    class Person(pydantic.BaseModel):
        name: str

    schema = Person.model_json_schema()
    forms = [check_sampling(json_schema=form).json_schema for form in (schema, json.dumps(schema), Person)]
    assert [json.loads(form or "") for form in forms] == [schema] * 3


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [("int", "-12 ", -12), (float, ".5\n", 0.5), (bool, "False", False), (str, '"a b"', "a b"), (None, " x", " x")],
)
def test_a_dtype_constrains_the_output_and_parses_it(dtype: Any, text: str, value: Any) -> None:
    sampling = check_sampling(dtype=dtype)
    assert sampling.value_of(text) == value
    assert type(sampling.value_of(text)) is type(value)
    assert sampling.constrained == (dtype is not None)


def test_numbers_end_at_white_space_and_texts_do_not() -> None:
    assert check_sampling(dtype=int, stop=";").stop == (";", " ", "\n")
    assert gen_string("x").sampling.stop == ()  # type: ignore[attr-defined]
    for text in ("", "maybe", "True "):
        with pytest.raises(ValueError, match=r"^$"):
            check_sampling(dtype=bool).value_of(text)


# ---- reasoning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MARKS)
def test_reasoning_and_answer_are_split_at_the_marks(model_type: str) -> None:
    begin, end, opens = MARKS[model_type]
    assert split_reasoning(f"{begin}\nI think.\n{end}\n\nYes.", model_type) == ("I think.", "Yes.")
    assert split_reasoning(f"{begin} still thinking", model_type) == ("still thinking", "")
    assert split_reasoning(f"I think.{end} Yes.", model_type) == (
        ("I think.", "Yes.") if opens else ("", f"I think.{end} Yes.")
    )
    assert split_reasoning("Yes.", model_type) == (("Yes.", "") if opens else ("", "Yes."))


@pytest.mark.parametrize(
    "write",
    [lambda: f"It is {gen('a')}.", lambda: str(select("a", ["x"])), lambda: "It is %s." % gen("a")],  # noqa: UP031
    ids=["f-string", "str", "percent"],
)
def test_a_call_cannot_be_converted_to_text(write: Callable[[], str]) -> None:
    with pytest.raises(TypeError, match="it has no text yet"):
        write()


def test_numpy_numbers_are_accepted() -> None:
    assert as_expr(np.int64(3)) == Text("3")
    sampling = check_sampling(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=[np.int64(2)])
    assert (type(sampling.max_tokens), type(sampling.temperature)) == (int, float)
    assert type(sampling.stop_token_ids[0]) is int
    assert isinstance(gen_int("x", 4), Gen)


def test_the_frames_of_videos_are_not_chosen() -> None:
    with pytest.raises(Unsupported, match="num_frames"):
        video("a.mp4", 8)
