"""The acceptance programs of the language, for models/tiny: plain functions, and their expected results. Those in
`PROGRAMS` take no decision on a model's text and put no argument into an f-string, so they can be traced and compiled;
those in `DECIDING` cannot."""

from __future__ import annotations

from typing import Any

from treeline_lang import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    select,
    system,
    token_length_normalized,
    unconditional_likelihood_normalized,
    user,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHOTS = (("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"))
CITIES = (" Berlin", " Paris", " Rome", " Buenos Aires")


def few_shot_qa(s: Any, country: Any) -> None:
    for shown, capital in SHOTS:
        s += user("What is the capital of " + shown + "?")
        s += assistant("The capital of " + shown + " is " + capital + ".")
    s += user("What is the capital of " + country + "?")
    s += assistant("The capital of " + country + " is" + gen("answer", max_tokens=8, stop="."))


def multi_turn(s: Any, country: Any, other: Any) -> None:
    s += system("You are a helpful assistant.")
    s += user("What is the capital of " + country + "?")
    s += assistant(gen("first", max_tokens=16))
    s += user("What is the capital of " + other + "?")
    s += assistant(gen("second", max_tokens=16))


def expert_answer(s: Any, question: Any) -> None:
    s += system("You are a helpful assistant.")
    s += user(question)
    s += assistant(gen("draft", max_tokens=24))
    s += user("Repeat: " + s["draft"])
    s += assistant(gen("answer", max_tokens=24))


def tree_of_thought(s: Any, question: Any) -> None:
    s += user(question)
    proposals = s.fork(2)
    proposals += lambda i: assistant(gen("plan", max_tokens=12))
    for proposal in proposals:
        proposal += user("What is 2 plus 5?")
        ways = proposal.fork(2)
        ways += assistant(gen("result", max_tokens=12))
        ways.join()
    proposals.join()


def skeleton_of_thought(s: Any, topic: Any) -> None:
    s += system("You are a helpful assistant.")
    s += user("What is " + topic + "?")
    s += assistant(gen("skeleton", max_tokens=24))
    points = s.fork(3)
    for point, country in zip(points, ("France", "Italy", "Spain"), strict=True):
        point += user("What is the capital of " + country + "?")
        point += assistant(gen("point", max_tokens=16))
    points.join()
    s.set_var("points", s["point"])


def judge(s: Any, essay: Any) -> None:
    s += system("You judge essays.")
    s += user("Essay: " + essay)
    forks = s.fork(3)
    for fork, number in zip(forks, ("7", "8", "9"), strict=True):
        fork += user("What is 1 plus " + number + "?")
        fork += assistant(gen("verdict", max_tokens=16, stop="END"))
    forks.join()
    s += user("Which is best?") + assistant(select("best", ["first", "second"]))


def parallel_decoding(s: Any, first: Any, second: Any) -> None:
    s += "Two capitals.\n"
    forks = s.fork(2)
    for fork, country in zip(forks, (first, second), strict=True):
        fork += "The capital of " + country + " is" + gen("capital", max_tokens=6, stop=".")
    forks.join()
    s += "Done.\n" + gen("end", max_tokens=2)


def parallel_encoding(s: Any, first: Any, second: Any) -> None:
    s += "Read:\n"
    forks = s.fork(2)
    forks += [first + "\n", second + "\n"]
    forks.join("concate_and_append")
    s += "The capital of France is" + gen("answer", max_tokens=6, stop=".")


def json_by_regex(s: Any, name: Any) -> None:
    s += user("Give me a JSON object with name " + name + " and age 36.")
    with s.assistant():
        s += '{"name": "' + gen("name", regex=r"[A-Z][a-z]{1,9}", max_tokens=12)
        s += '", "age": ' + gen("age", regex=r"[0-9]{1,3}", max_tokens=4) + "}"


def json_by_schema(s: Any, name: Any) -> None:
    s += user("Give me a JSON object with name " + name + " and age 36.")
    s += assistant(gen("person", max_tokens=60, json_schema=PERSON))


def dtypes(s: Any, first: Any) -> None:
    s += user("What is " + first + " plus 4?")
    s += assistant(first + " + 4 = " + gen_int("whole", max_tokens=4))
    s += "\nA fraction: " + gen("fraction", dtype=float, max_tokens=6)
    s += "\nTrue or False: " + gen("truth", dtype=bool, max_tokens=6)
    s += "\nA word: " + gen_string("word", max_tokens=12)


def selects(s: Any, country: Any) -> None:
    s += "The capital of " + country + " is"
    for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized):
        with s.copy() as branch:
            branch += select(method.name, CITIES, choices_method=method)
    s += gen("same", choices=list(CITIES))


def samples(s: Any, country: Any) -> None:
    s += "The capital of " + country + " is" + gen("several", n=3, max_tokens=4)
    s += " And" + gen("more", max_tokens=4)


def stops(s: Any, country: Any) -> None:
    question = user("What is the capital of " + country + "?")
    s += question + assistant(gen("text", stop="capital"))
    s += question + assistant(gen("pattern", stop_regex=r"c[a-z]+l"))
    s += question + assistant(gen("long", min_tokens=24, max_tokens=24))


def scopes(s: Any, country: Any) -> None:
    s.set_var("country", country)
    s += user("What is the capital of " + country + "?")
    s += assistant_begin()
    with s.var_scope("turn"):
        s += "The capital" + gen("rest", max_tokens=12)
    s += assistant_end()
    with s.copy() as branch:
        branch += user("What is 2 plus 5?") + assistant(gen("aside", max_tokens=12))


def logprobs(s: Any, country: Any) -> None:
    s += "The capital of " + country + " is"
    s += gen("answer", max_tokens=4, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True)


def react(s: Any, question: Any) -> None:
    """An agent that acts up to three times: `tools` gives the next question for a word of an answer."""
    s += system("You are a helpful assistant.")
    tools = {"France": "What is 4 plus 5?", "4 + 5": "What is the capital of Italy?"}
    asked = question
    for step in range(3):
        s += user(asked)
        s += assistant(gen(f"act{step}", max_tokens=20))
        found = [then for word, then in tools.items() if word in s[f"act{step}"]]
        if not found:
            s.set_var("final", s[f"act{step}"])
            return
        asked = found[0]


def tool_use(s: Any, first: int, second: int) -> None:
    s += user(f"What is {first} plus {second}?")
    s += assistant(gen("said", max_tokens=20))
    s.set_var("right", int(s["said"].split()[-1]) == first + second)


GREEDY: dict[str, Any] = {"temperature": 0.0}
PROGRAMS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (few_shot_qa, {"country": "France"}, GREEDY),
    (multi_turn, {"country": "France", "other": "Italy"}, GREEDY),
    (expert_answer, {"question": "What is the capital of Spain?"}, GREEDY),
    (tree_of_thought, {"question": "What is 4 plus 5?"}, GREEDY),
    (skeleton_of_thought, {"topic": "a volcano"}, GREEDY),
    (judge, {"essay": "The fox jumps over the dog."}, GREEDY),
    (parallel_decoding, {"first": "France", "second": "Italy"}, GREEDY),
    (parallel_encoding, {"first": "The sky is blue.", "second": "Grass is green."}, GREEDY),
    (json_by_regex, {"name": "Ada"}, GREEDY),
    (json_by_schema, {"name": "Ada"}, GREEDY),
    (dtypes, {"first": "3"}, GREEDY),
    (selects, {"country": "France"}, GREEDY),
    (samples, {"country": "France"}, GREEDY),
    (stops, {"country": "France"}, {**GREEDY, "max_new_tokens": 32}),
    (scopes, {"country": "France"}, GREEDY),
    (logprobs, {"country": "France"}, GREEDY),
]
DECIDING: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (react, {"question": "What is the capital of France?"}, GREEDY),
    (tool_use, {"first": 3, "second": 5}, GREEDY),
]
