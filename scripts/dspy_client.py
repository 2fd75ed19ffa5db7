"""The program of `make clients ARGS=dspy`: DSPy's programs by its own `dspy.LM`, which takes any server of OpenAI's
API.

The model is too small to write DSPy's format by itself, so each request has a regex or a schema that enforces it, as
one would do for any small model. The text in the fields is nonsense; the test is that each field is found.

    python scripts/dspy_client.py URL
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices

import dspy

FACTS = ["Paris is the capital of France.", "The Seine flows through Paris.", "Oslo is the capital of Norway."]
QUESTION = "What is the capital of France?"
ANSWER = r"[A-Z][A-Za-z ,.]{0,60}"


def held_to(*fields: str) -> dict[str, Any]:
    """Options of a program, for answers in the format of DSPy's ChatAdapter."""
    regex = "".join(rf"\[\[ ## {field} ## \]\]\n{ANSWER}\n" for field in fields) + r"\[\[ ## completed ## \]\]"
    return {"extra_body": {"regex": regex}}


class Rag(dspy.Module):  # type: ignore[misc]
    """Retrieval of facts by common words, then an answer from them."""

    def __init__(self) -> None:
        super().__init__()
        self.respond = dspy.ChainOfThought("context, question -> answer", **held_to("reasoning", "answer"))

    def retrieve(self, question: str) -> list[str]:
        wanted = set(re.findall(r"\w+", question.lower()))
        return sorted(FACTS, key=lambda fact: -len(wanted & set(re.findall(r"\w+", fact.lower()))))[:2]

    def forward(self, question: str) -> Any:
        return self.respond(context=self.retrieve(question), question=question)


def check(lm: Any, prediction: Any, *fields: str) -> None:
    """Checks that the fields are the ones in the server's answer."""
    last = lm.history[-1]
    for field in fields:
        assert re.fullmatch(ANSWER, prediction[field]), prediction
        assert f"[[ ## {field} ## ]]\n{prediction[field]}" in last["outputs"][0], last["outputs"]
    assert last["usage"]["prompt_tokens"] > 0


def refused(error: type[Exception], lm: Any, **options: Any) -> None:
    try:
        lm(QUESTION, **options)
    except error:
        return
    raise AssertionError(f"{options} was no {error.__name__}")


def main(url: str) -> None:
    server: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "cache": False, "num_retries": 0}
    lm = dspy.LM("openai/tiny", max_tokens=96, temperature=0, **server)
    dspy.configure(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False))
    assert lm(QUESTION) == ["The capital of France is Paris."]
    check(lm, dspy.Predict("question -> answer", **held_to("answer"))(question=QUESTION), "answer")
    thought = dspy.ChainOfThought("question -> answer", **held_to("reasoning", "answer"))(question=QUESTION)
    check(lm, thought, "reasoning", "answer")
    check(lm, Rag()(question=QUESTION), "reasoning", "answer")
    assert FACTS[0] in lm.history[-1]["messages"][-1]["content"]
    asked = [dspy.Example(question=f"Where is {place}?").with_inputs("question") for place in ("Paris", "Oslo")]
    assert all(one is not None and one.answer for one in Rag().batch(asked, num_threads=2, disable_progress_bar=True))
    schema = {"type": "object", "properties": {"answer": {"enum": ["Paris", "Rome"]}}, "required": ["answer"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with dspy.context(adapter=dspy.JSONAdapter()):
        found = dspy.Predict("question -> answer", response_format=wanted)(question=QUESTION)
    assert found.answer in ("Paris", "Rome"), found
    refused(dspy.LMInvalidRequestError, lm, max_tokens=-1)
    refused(dspy.LMUnsupportedModelError, dspy.LM("openai/another", **server))


if __name__ == "__main__":
    main(sys.argv[1])
