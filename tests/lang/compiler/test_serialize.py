"""Programs in files: written and read alike, and refused where anything is not as it should be."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.echo_backend import EchoBackend
from treeline_lang import (
    Compiled,
    ProgramFileError,
    UnknownVariable,
    assistant,
    function,
    gen,
    gen_int,
    image,
    select,
    separate_reasoning,
    user,
)
from treeline_lang.compiler.nodes import Append
from treeline_lang.compiler.serialize import MAX_BYTES, MAX_DEPTH, dumps, loads

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


@function
def everything(s, question, shots=("a", "b"), times=3):
    with s.var_scope("all"):
        s += user("Q: " + question + shots[0])
        s += assistant(gen("x", max_tokens=4, stop=["\n", "END"], temperature=0.5) + gen_int("n"))
    forks = s.fork(2)
    forks += select("pick", ["a", "b" + question], choices_method="greedy_token_selection")
    forks.join()
    with s.any_order():
        s += times
        s += "constant"
    s += separate_reasoning("Think" + gen("idea", json_schema={"type": "object"}), "qwen3")
    s.set_var("kept", {"x": [s["x"], (1, 2.5, None, True)], "t": question + "!"})
    with s.copy() as copied:
        copied += gen("y", regex=r"\d+", n=2)
    s += image("https://example.org/a.png") + image(PNG)
    return s["kept"]


FILE = json.loads(dumps(everything.trace()))


def test_a_graph_is_the_same_after_a_file():
    graph = everything.trace()
    again = loads(dumps(graph))
    assert dumps(again) == dumps(graph)
    steps = [step for step in again.streams[0].steps if isinstance(step, Append)]
    pictures = [part for step in steps for part in step.parts]
    assert any(getattr(part, "source", "") == "data:image/png;base64,iVBORw0KGgoAAAAAAAAAAA==" for part in pictures)


def test_a_file_keeps_lines_but_not_where_the_program_was():
    text = dumps(everything.trace())
    assert '"test_serialize.py"' in text
    assert __file__ not in text


def test_save_and_load(tmp_path):
    @function
    def asks(s, word, more="!"):
        branches = s.fork(2)
        branches += lambda index: f"{index} " + word + more + gen("x", max_tokens=4)
        branches.join("concate_and_append")
        return s.get_var("x") if "x" in s else None

    compiled = asks.compile(strict=True)
    compiled.save(tmp_path / "asks.json")
    loaded = Compiled.load(tmp_path / "asks.json")
    assert loaded.graph == compiled.graph
    expected = asks.run(word="w", backend=EchoBackend())
    assert loaded.run(word="w", backend=EchoBackend()).text() == expected.text()
    assert loaded.run("w", "!", backend=EchoBackend()).messages() == expected.messages()
    with pytest.raises(TypeError, match="word"):
        loaded.run(backend=EchoBackend())


def test_an_interpreted_program_cannot_be_saved(tmp_path):
    compiled = function(lambda s, word: s.__iadd__(f"{word}")).compile()
    with pytest.raises(ProgramFileError, match=r"is interpreted, and cannot be in a file: .*formatted"):
        compiled.save(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda s: s.__iadd__(gen("x", stop_regex="a+")), "stop_regex cannot be in a file"),
        (lambda s: s.set_var("x", object()), "cannot be in a file: texts, numbers"),
        (lambda s: s.set_var("x", float("nan")), "nan cannot be in a file: texts, numbers"),
    ],
)
def test_what_no_file_holds_is_refused_when_it_is_written(act, reason):
    with pytest.raises(ProgramFileError, match=reason):
        dumps(function(act).trace())


def changed(path: list[str | int], value: object) -> str:
    data = copy.deepcopy(FILE)
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(data)


GEN = ["streams", 0, "steps", 2, "parts", 1]
DEEP = {"is": "items", "mutable": True, "items": []}
for _ in range(MAX_DEPTH + 5):
    DEEP = {"is": "items", "mutable": True, "items": [DEEP]}
REFUSED = {
    "no JSON": ("{", "this is not JSON"),
    "deep JSON": ("[" * 100_000, "this is not JSON"),
    "no program": ("{}", "this is no program"),
    "a list": ("[]", "this is no program"),
    "later": (changed(["treeline_program"], 2), "a program of version 2, not 1"),
    "unknown field": (changed(["exec"], "x"), "program: has no field 'exec'"),
    "no streams": (changed(["streams"], []), "program.streams: there is none"),
    "text": (changed(["name"], 5), "program.name: not a name"),
    "long name": (changed(["name"], "x" * 300), "program.name: not a name"),
    "kind": (changed([*GEN, "is"], "exec"), r"program.streams\[0\].steps\[2\].parts\[1\]: not a part: one of"),
    "sampling": (changed([*GEN, "sampling"], {"temperature": "hot"}), "parts.*sampling: temperature is a number"),
    "sampling field": (changed([*GEN, "sampling"], {"__class__": 1}), "sampling: .*no parameter '__class__'"),
    "stop_regex": (changed([*GEN, "sampling"], {"stop_regex": ["(a+)+$"]}), "stop_regex cannot be in a file"),
    "regex": (changed([*GEN, "sampling"], {"regex": "("}), "the regex '\\(' is wrong"),
    "missing": (changed([*GEN], {"is": "gen"}), "missing .* 'name'"),
    "role": (changed(["streams", 0, "steps", 1, "parts", 0, "role"], "root"), "not one of system, user, assistant"),
    "method": (changed(["streams", 1, "steps", 0, "parts", 0, "method"], "any"), "method: not one of token_length"),
    "empty choice": (changed(["streams", 1, "steps", 0, "parts", 0, "choices"], [""]), "a choice is empty"),
    "children": (changed(["streams", 0, "steps", 4, "children"], [0, 1]), "stream 0 cannot be forked from stream 0"),
    "no such child": (changed(["streams", 0, "steps", 4, "children"], [1, 99]), "stream 99 cannot be forked"),
    "join": (changed(["streams", 0, "steps", 5, "children"], [3]), "stream 3 cannot be joined|cannot be joined"),
    "twice": (changed(["streams", 0, "steps", 5, "children"], [1, 1]), "stream 1 cannot be joined"),
    "parameter": (changed(["parameters", 0, "name"], "__import__('os')"), "names of parameters are identifiers"),
    "no parameter": (changed(["parameters"], []), "it needs an argument 'question'"),
    "deep": (changed(["returns"], DEEP), "too deep"),
    "unknown variable": (
        changed(["returns"], {"is": "variable", "stream": 7, "name": "x", "nth": 0, "path": []}),
        "nothing generates the variable 'x' of stream 7",
    ),
    "state": (changed(["returns"], {"is": "state", "stream": 70}), "a state that there is not"),
    "no choices": (changed(["streams", 1, "steps", 0, "parts", 0, "choices"], []), "choices: there is no choice"),
    "long version": (changed(["treeline_program"], "x" * 9000), "^this is no program$"),
    "a number that JSON has not": (
        changed(["returns"], {"is": "const", "value": float("inf")}),
        "not a constant: 'inf'",
    ),
    "keyword": (changed(["parameters", 0, "name"], "class"), "names of parameters are identifiers"),
    "model type": (changed(["streams", 0, "steps", 10, "parts", 0, "model_type"], []), "model_type: not one of"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_file_is_refused_with_the_place(text, reason):
    with pytest.raises(ProgramFileError, match=reason):
        loads(text)


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ProgramFileError, match="larger than 16 MiB"):
        Compiled.load(large)
    with pytest.raises(ProgramFileError, match="larger than 16 MiB"):
        loads(b" " * (MAX_BYTES + 1))


def test_steps_that_wait_for_each_other_are_refused():
    @function
    def crossed(s):
        branches = s.fork(2)
        branches += gen("x")
        branches[0] += branches[1]["x"]
        branches[1] += "end"

    data = json.loads(dumps(crossed.trace()))
    first, second = data["streams"][1]["steps"], data["streams"][2]["steps"]
    hole = copy.deepcopy(first[1])
    hole["parts"][0]["value"]["stream"] = 1
    first.insert(0, first.pop(1))
    second.insert(0, hole)
    with pytest.raises(ProgramFileError, match="wait for each other in a circle"):
        loads(json.dumps(data))


@pytest.mark.parametrize("ends", [True, False])
def test_the_text_of_a_scope_is_read_behind_its_end_or_not_at_all(ends):
    @function
    def scoped(s):
        with s.var_scope("x"):
            s += "a"
        s += s["x"]

    data = json.loads(dumps(scoped.trace()))
    steps = data["streams"][0]["steps"]
    assert loads(json.dumps(data)).order() == [(0, number) for number in range(4)]
    steps[2:] = [steps[3], steps[2]] if ends else [steps[3]]
    with pytest.raises(
        ProgramFileError, match="wait for each other in a circle" if ends else "nothing generates .* 'x'"
    ):
        loads(json.dumps(data))


def test_a_program_that_reads_a_scope_within_it_is_interpreted_and_refused_there():
    @function
    def scoped(s):
        with s.var_scope("x"):
            s += s["x"]

    assert "the text of a scope, and that has not ended" in scoped.compile().fallback
    with pytest.raises(UnknownVariable, match="that has not ended"):
        scoped.compile().run(backend=EchoBackend())


def test_what_is_kept_and_returned_is_bounded_too():
    @function
    def keeps(s, times):
        with s.var_scope("x"):
            for _ in range(100):
                s += gen("y")
        s.set_var("kept", "".join(["-"]) + s["x"])
        return {"all": ["!" + s["x"]]}

    data = json.loads(dumps(keeps.trace(times=1)))
    assert loads(json.dumps(data))
    many = copy.deepcopy(data)
    kept = next(step for step in many["streams"][0]["steps"] if step["is"] == "set_var")
    kept["value"]["parts"] *= 200
    returned = copy.deepcopy(data)
    returned["returns"]["entries"][0][1]["items"][0]["parts"] *= 200
    for file in (many, returned):
        with pytest.raises(ProgramFileError, match="what it keeps and returns can grow"):
            loads(json.dumps(file))


def test_a_parameter_may_be_called_state():
    compiled = function(lambda s, state: s.__iadd__("a" + state)).compile(strict=True)
    assert compiled.run(state="b", backend=EchoBackend()).text() == "ab"


def test_a_device_without_an_end_is_no_program():
    with pytest.raises(ProgramFileError, match="larger than 16 MiB"):
        Compiled.load("/dev/zero")


def test_a_text_that_doubles_with_every_step_is_refused():
    @function
    def doubles(s, times):
        s += gen("x0")
        for number in range(times):
            with s.var_scope(f"x{number + 1}"):
                s += s[f"x{number}"]
                s += s[f"x{number}"]

    assert loads(dumps(doubles.trace(times=8)))
    with pytest.raises(ProgramFileError, match="stream 0 can grow without a bound"):
        loads(dumps(doubles.trace(times=40)))


def test_pictures_are_in_the_file_and_no_others_are_shown(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)

    def shows(source):
        return dumps(function(lambda s: s.__iadd__(image(source))).trace())

    (step,) = loads(shows(str(tmp_path / "a.png"))).streams[0].steps
    assert step.parts[0].source.startswith("data:image/png;base64,")
    with pytest.raises(ProgramFileError, match="no image: "):
        shows(str(tmp_path / "b.png"))
    text = shows("https://example.org/a.png")
    assert loads(text)
    for source in ("a.png", "../b.png", "/etc/hostname", "~/x.png", "file:///etc/hostname", "a\0b"):
        with pytest.raises(ProgramFileError, match="source: not the URL of an image"):
            loads(text.replace('"https://example.org/a.png"', json.dumps(source)))


def places(node, path=()):
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


ODD = [None, True, -1, 0, 1, 2**60, 1e308, "", "x", [], {}, [[]], {"is": "gen"}, "a" * 1000, [0] * 5000, "\ud800"]


@given(st.sampled_from([path for path in places(FILE) if path]), st.sampled_from(ODD))
def test_any_change_of_a_file_is_refused_or_is_another_program(path, value):
    """A file is a program or a ProgramFileError: nothing else comes of reading it."""
    try:
        graph = loads(changed(list(path), value))
    except ProgramFileError:
        return
    assert loads(dumps(graph)) == graph
