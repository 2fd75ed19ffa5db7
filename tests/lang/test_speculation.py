"""Speculation: the same program gives the same result, in fewer calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from treeline_lang import Refused, Unmatched, assistant, function, gen, user
from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.program import Function
from treeline_lang.sampling import Sampling
from treeline_lang.speculation import Pattern, eligible
from treeline_lang.state import ProgramState
from treeline_lang.transcript import Prompt

TOKEN_CHARS = 3
"""Tokens end at multiples of it, counted from the beginning of the text, wherever a request begins."""


class ScriptedModel(Backend):
    """A deterministic model: a longer answer equals the shorter ones in sequence."""

    tells_tokens = True

    def __init__(
        self,
        script: Mapping[str, str],
        *,
        chats: bool = False,
        goes_on: bool = True,
        tells_tokens: bool = True,
        most: int = 1 << 31,
    ) -> None:
        """script: the end of a text → the next character, "" for the end; the longest end counts. most: the largest
        number of tokens that may be requested."""
        self._script = dict(sorted(script.items(), key=lambda item: -len(item[0])))
        self.chats, self._goes_on, self.tells_tokens = chats, goes_on, tells_tokens
        self._most = most
        self.asked: list[Sampling] = []
        self.prompt_chars = 0

    async def continues(self) -> bool:
        return self._goes_on

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        self.asked.append(sampling)
        self.prompt_chars += len(prompt.text)
        if sampling.limit > self._most:
            raise Refused(f"{sampling.limit} tokens are too many")
        return [self._complete(prompt.text, sampling) for _ in range(sampling.n or 1)]

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        self.asked.append(sampling)
        yield self._complete(prompt.text, sampling)

    def _complete(self, text: str, sampling: Sampling) -> Completion:
        tokens: list[str] = []
        finish: dict[str, Any] = {"type": "length", "length": sampling.limit}
        said = ""
        while len(tokens) < sampling.limit:
            piece, ended = self._token(text + said)
            if piece:
                tokens.append(piece)
                said += piece
            found = [(said.find(stop) + len(stop), -len(stop), stop) for stop in sampling.stop if stop in said]
            if found:
                end, _, stop = min(found)
                said, finish = said[: end - len(stop)], {"type": "stop", "matched": stop}
                break
            if ended:
                finish = {"type": "stop", "matched": None}
                break
        meta: dict[str, Any] = {"finish_reason": finish, "prompt_tokens": len(text), "completion_tokens": len(tokens)}
        if sampling.return_logprob and self.tells_tokens:
            meta["output_token_logprobs"] = [(0.0, 0, token) for token in [*tokens, "<end>"]]
        return Completion(said, meta)

    def _token(self, text: str) -> tuple[str, bool]:
        """Return a token, and whether it is the end."""
        piece = ""
        while True:
            character = next((said for end, said in self._script.items() if text.endswith(end)), "")
            if not character:
                return piece, not piece
            text, piece = text + character, piece + character
            if len(text) % TOKEN_CHARS == 0:
                return piece, False


def says(text: str, continuation: str) -> dict[str, str]:
    """Return a script that continues texts with this end."""
    whole = text + continuation
    return {whole[:at]: whole[at] for at in range(len(text), len(whole))}


SHOTS = "Text: Ada wrote it. Author: Ada; Year: 1843; Genre: notes;\nText: Moby-Dick is by Melville. Author: "
FIELDS = ("author", "year", "genre")


def extraction(tokens: int | None) -> Function:
    @function(num_api_spec_tokens=tokens)
    def program(s: ProgramState) -> None:
        s += SHOTS + gen("author", stop=";", max_tokens=8)
        s += "; Year: " + gen("year", stop=";", max_tokens=8)
        s += "; Genre: " + gen("genre", stop=";", max_tokens=8) + ";"

    return program


def calls_of(state: ProgramState, names: Any) -> int:
    return sum(state.get_meta_info(name)["calls"] for name in names)


def test_three_fields_take_one_call() -> None:
    script = says(SHOTS, "Melville; Year: 1851; Genre: novel;\nText: ")
    plain, speculated = ScriptedModel(script), ScriptedModel(script)
    expected = extraction(None).run(backend=plain, temperature=0)
    state = extraction(64).run(backend=speculated, temperature=0)
    assert [state[name] for name in FIELDS] == ["Melville", "1851", "novel"]
    assert (state.text(), state.variables) == (expected.text(), expected.variables)
    assert (len(plain.asked), len(speculated.asked)) == (3, 1) == (3, calls_of(state, FIELDS))
    assert plain.prompt_chars >= 3 * speculated.prompt_chars
    costs = [state.get_meta_info(name)["prompt_tokens"] for name in FIELDS]
    assert costs == [len(SHOTS), 0, 0]
    assert state.get_meta_info("year")["finish_reason"] == {"type": "stop", "matched": ";"}
    assert "output_token_logprobs" not in state.get_meta_info("author")


def test_texts_that_were_not_speculated_are_requested_again() -> None:
    script = says(SHOTS, "Melville; Pages: 600;") | says(SHOTS + "Melville; Year: ", "1851; Genre: novel;")
    model = ScriptedModel(script)
    state = extraction(64).run(backend=model, temperature=0)
    assert [state[name] for name in FIELDS] == ["Melville", "1851", "novel"]
    assert len(model.asked) == 2


def test_limits_count_tokens() -> None:
    """A token has up to three characters: a limit of two cuts the text as a call by itself does."""

    @function(num_api_spec_tokens=32)
    def program(s: ProgramState) -> None:
        s += "abc" + gen("one", max_tokens=1) + gen("two", max_tokens=2) + gen("three", max_tokens=4, stop="z")

    model = ScriptedModel(says("abc", "defghijklmnopqrstuvwxyz and on and on and on"))
    state = program.run(backend=model)
    assert (state["one"], state["two"], state["three"]) == ("def", "ghijkl", "mnopqrstuvwx")
    assert state.get_meta_info("two")["finish_reason"] == {"type": "length", "length": 2}
    assert len(model.asked) == 1


STEP = st.one_of(
    st.text("a:;", min_size=1, max_size=3),
    st.tuples(st.integers(1, 4), st.lists(st.sampled_from([":", ";", "a;", "::"]), max_size=2, unique=True)),
)
SCRIPT = st.dictionaries(st.text("a:;", max_size=3), st.sampled_from(["a", ":", ";", "a", ""]), min_size=2, max_size=14)


def program_of(steps: list[Any], tokens: int | None, *, turns: bool = False) -> tuple[Function, list[str]]:
    names = [f"v{number}" for number, step in enumerate(steps) if not isinstance(step, str)]

    @function(num_api_spec_tokens=tokens)
    def program(s: ProgramState) -> None:
        pieces: list[Any] = [
            step if isinstance(step, str) else gen(f"v{number}", max_tokens=step[0], stop=step[1] or None)
            for number, step in enumerate(steps)
        ]
        if turns:
            whole = pieces[0]
            for piece in pieces[1:]:
                whole = whole + piece
            s += user("a") + assistant(whole)
            return
        s += "a"
        for piece in pieces:
            s += piece

    return program, names


@given(steps=st.lists(STEP, min_size=1, max_size=7), script=SCRIPT, tokens=st.integers(1, 30))
@hypothesis_settings(max_examples=150)
def test_speculation_gives_the_same_result_in_no_more_calls(
    steps: list[Any], script: dict[str, str], tokens: int
) -> None:
    plain, speculated = ScriptedModel(script), ScriptedModel(script)
    one, names = program_of(steps, None)
    other, _ = program_of(steps, tokens)
    expected, state = one.run(backend=plain, temperature=0), other.run(backend=speculated, temperature=0)
    assert (state.text(), state.variables) == (expected.text(), expected.variables)
    assert len(speculated.asked) <= len(plain.asked)
    assert len(speculated.asked) == calls_of(state, names)
    for name in names:
        reasons = [one.get_meta_info(name)["finish_reason"] for one in (state, expected)]
        assert reasons[0] == reasons[1]


@given(steps=st.lists(STEP, min_size=2, max_size=5), script=SCRIPT, tokens=st.integers(1, 30))
@hypothesis_settings(max_examples=100)
def test_a_speculated_turn_gives_the_same_text(steps: list[Any], script: dict[str, str], tokens: int) -> None:
    plain, speculated = ScriptedModel(script, chats=True), ScriptedModel(script, chats=True)
    one, names = program_of(steps, None, turns=True)
    other, _ = program_of(steps, tokens, turns=True)
    expected, state = one.run(backend=plain, temperature=0), other.run(backend=speculated, temperature=0)
    assert (state.text(), state.variables) == (expected.text(), expected.variables)
    assert len(speculated.asked) <= len(plain.asked) + 1  # for the one that came out otherwise
    assert not names or len(speculated.asked) == calls_of(state, names)


def turn(tokens: int | None = 64) -> Function:
    @function(num_api_spec_tokens=tokens)
    def program(s: ProgramState, who: str) -> None:
        s += user("Who is " + who + "?")
        s += assistant("Name: " + gen("name", stop="\n") + "\nYear: " + gen("year", stop="\n", max_tokens=8))

    return program


def reply(who: str, text: str) -> dict[str, str]:
    return says(f"USER: Who is {who}?\nASSISTANT: ", text)


@pytest.mark.parametrize("tells", [True, False])
def test_a_turn_of_a_chat_is_one_call(tells: bool) -> None:
    model = ScriptedModel(reply("Ada", "Name: Ada\nYear: 1815\nand on"), chats=True, goes_on=False, tells_tokens=tells)
    state = turn().run(who="Ada", backend=model)
    assert (state["name"], state["year"]) == ("Ada", "1815")
    assert state.messages()[-1] == {"role": "assistant", "content": "Name: Ada\nYear: 1815"}
    assert len(model.asked) == 1 == calls_of(state, ("name", "year"))


def test_a_reply_that_is_not_the_turn_is_never_used() -> None:
    script = reply("Ada", "It is Ada.\nYear: 1815")
    model = ScriptedModel(script, chats=True, goes_on=False)
    state = turn().run(who="Ada", backend=model, temperature=0.5)
    with pytest.raises(Unmatched, match="3 times"):
        state["year"]
    assert len(model.asked) == 3
    going_on = says("Name: ", "Ada\n") | says("Year: ", "1815\n")
    model = ScriptedModel(script | going_on, chats=True)
    state = turn().run(who="Ada", backend=model, temperature=0.5)
    assert (state["name"], state["year"]) == ("Ada", "1815")
    assert len(model.asked) == 5 == calls_of(state, ("name", "year"))


def test_streams_of_a_batch_are_independent() -> None:
    people = [f"P{number}" for number in range(12)]
    script: dict[str, str] = {}
    for number, who in enumerate(people):
        script |= reply(who, f"Name: {who}\nYear: 18{number:02}\n")
    model = ScriptedModel(script, chats=True, goes_on=False)
    states = turn().run_batch([{"who": who} for who in people], backend=model)
    assert [(state["name"], state["year"]) for state in states] == [
        (who, f"18{number:02}") for number, who in enumerate(people)
    ]
    assert len(model.asked) == len(people)


def test_forks_and_bound_programs_speculate_and_branches_send_their_own_requests() -> None:
    @function(num_api_spec_tokens=32)
    def program(s: ProgramState, start: str) -> None:
        s += start + gen("first", stop=";")
        branches = s.fork(2)
        for branch in branches:
            branch += ";" + gen("x", stop=";") + ";" + gen("y", stop=";")
        branches.join()
        s += ";" + gen("last", stop=";")

    model = ScriptedModel(says("go ", "a;b;c;d;"))
    state = program.bind(start="go ").run(backend=model, hints=False)
    assert (state["first"], state["x"], state["y"], state["last"]) == ("a", ["b", "b"], ["c", "c"], "b")
    assert len(model.asked) == 3  # one for each of the three states


def test_a_called_program_speculates_by_its_own_setting() -> None:
    @function
    def outer(s: ProgramState) -> None:
        s += extraction(64)()["year"]

    model = ScriptedModel(says(SHOTS, "Melville; Year: 1851; Genre: novel;"))
    assert outer.run(backend=model).text() == "1851"
    assert len(model.asked) == 1


def test_streams_and_constraints_are_not_speculated() -> None:
    script = says(SHOTS, "Melville; Year: 1851; Genre: novel;")
    model = ScriptedModel(script)
    state = extraction(64).run(backend=model, stream=True)
    assert "".join(state.text_iter("genre")) == "novel"
    assert [sampling.stop for sampling in model.asked] == [(";",)] * 3
    for sampling in (Sampling(regex="a"), Sampling(n=2), Sampling(frequency_penalty=0.5), Sampling(min_tokens=1)):
        assert not eligible(sampling)
    assert eligible(Sampling(n=1, temperature=0.7, stop=("a",), max_tokens=3, frequency_penalty=0.0))


class _Untold(ScriptedModel):
    """A model whose tokens do not add up to its text, as with half a character."""

    def _complete(self, text: str, sampling: Sampling) -> Completion:
        made = super()._complete(text, sampling)
        if "output_token_logprobs" in made.meta:
            made.meta["output_token_logprobs"] = [(0.0, 0, "\ufffd")] * 3
        return made


def test_tokens_that_are_not_the_text_cost_one_call() -> None:
    model: Backend = _Untold(says(SHOTS, "Melville; Year: 1851; Genre: novel;"))
    state = extraction(64).run(backend=model)
    assert [state[name] for name in FIELDS] == ["Melville", "1851", "novel"]
    assert calls_of(state, FIELDS) == 4


def test_a_request_refused_with_speculation_is_sent_without() -> None:
    model = ScriptedModel(says(SHOTS, "Melville; Year: 1851; Genre: novel;"), most=8)
    state = extraction(64).run(backend=model)
    assert [state[name] for name in FIELDS] == ["Melville", "1851", "novel"]
    script = reply("Ada", "Name: Ada\nYear: 1815\n")
    state = turn().run(who="Ada", backend=ScriptedModel(script, chats=True, most=128))
    assert (state["name"], state["year"]) == ("Ada", "1815")
    state = turn().run(who="Ada", backend=ScriptedModel(script, chats=True, most=128, goes_on=False))
    assert isinstance(state.error(), Refused)


def test_one_call_can_satisfy_several_patterns() -> None:
    stopped, free = Sampling(stop=("\n",)), Sampling(max_tokens=4)
    assert Pattern((stopped, "\nb: ", free)).speculates(continues=True)
    assert not Pattern((free, "b", stopped)).speculates(continues=True)  # nothing says where the first one ends
    assert not Pattern(("a: ", free)).speculates(continues=True)
    assert Pattern(("a: ", free)).speculates(continues=False)
    assert not Pattern((free,)).speculates(continues=False)
    assert not Pattern((stopped, "\n", Sampling(temperature=0.3))).speculates(continues=False)
    assert Pattern((stopped, "ä", free, "rest")).asked(5, tells_tokens=False) == Sampling(max_tokens=128 + 2 + 4)
