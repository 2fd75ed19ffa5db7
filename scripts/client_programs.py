"""The programs that `make clients` runs with client libraries: `python scripts/client_programs.py openai URL`.

Each asks for a whole answer and a stream of the same text, for JSON of a class and for a tool call, and sends the other
requests that do not depend on the model. The tiny model's text is nonsense; the test is that a library reads all of it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal

from pydantic import BaseModel

SAY = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}


class Place(BaseModel):
    """The schema of an answer about a place."""

    city: Literal["Paris", "Rome"]
    large: bool


def openai(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "messages": SAY, "max_tokens": 8, "temperature": 0}
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.chat.completions.with_raw_response.create(
        **asked, reasoning_effort="low", verbosity="low", store=True, metadata={"a": "b"}, service_tier="flex"
    )
    assert "verbosity" in whole.headers["x-treeline-ignored"]
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.parse().choices[0].message.content, (text, whole)
    scored = client.completions.create(model="tiny", prompt="The capital", max_tokens=4, logprobs=2, echo=True)
    logprobs = scored.choices[0].logprobs
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert scored.choices[0].text[offset:].startswith(token)
    made = client.chat.completions.create(
        model="tiny", messages=SAY, tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False
    )
    [call] = made.choices[0].message.tool_calls
    check_call(call.function.name, json.loads(call.function.arguments))
    read = client.chat.completions.parse(model="tiny", messages=SAY, response_format=Place)
    assert isinstance(read.choices[0].message.parsed, Place)
    response = client.responses.create(model="tiny", input="Hello", max_output_tokens=8, reasoning={"effort": "low"})
    assert response.usage.output_tokens == 8
    refused = None
    try:
        client.chat.completions.create(model="tiny", messages=SAY, functions=[{"name": "f"}])
    except openai.BadRequestError as error:
        refused = error.param
    assert refused == "functions"


def anthropic(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "messages": SAY, "max_tokens": 8, "system": "Be brief."}
    asked |= {"extra_body": {"temperature": 0}}
    whole = client.messages.create(
        **asked, metadata={"user_id": "u"}, service_tier="auto", thinking={"type": "enabled", "budget_tokens": 1024}
    )
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_text() == whole.content[0].text
    tool: Any = {"name": "look_up", "input_schema": PARAMETERS}
    called = client.messages.create(
        model="tiny", messages=SAY, max_tokens=200, tools=[tool], tool_choice={"type": "tool", "name": "look_up"}
    )
    [call] = [block for block in called.content if block.type == "tool_use"]
    check_call(call.name, call.input)
    read = client.messages.parse(model="tiny", messages=SAY, max_tokens=200, output_format=Place)
    assert isinstance(read.parsed_output, Place)
    counted = client.messages.count_tokens(model="tiny", messages=SAY, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def ollama(url: str) -> None:
    import ollama

    client = ollama.Client(host=url)
    assert [model.model for model in client.list().models] == ["tiny"]
    options = {"num_predict": 8, "temperature": 0, "num_ctx": 4096}
    whole = client.chat("tiny:latest", SAY, options=options, keep_alive="5m")
    parts = client.chat("tiny", SAY, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    text = client.generate("tiny", "The capital of France is", raw=True, options=options)
    assert text.response
    placed = client.chat("tiny", SAY, format=Place.model_json_schema())
    Place.model_validate_json(placed.message.content or "")


def litellm(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
    import litellm

    for model, base in (("openai/tiny", url + "/v1"), ("hosted_vllm/tiny", url + "/v1"), ("anthropic/tiny", url)):
        asked: Any = {"model": model, "api_base": base, "api_key": "none", "messages": SAY, "num_retries": 0}
        greedy = asked | {"max_tokens": 8, "temperature": 0, "user": "u", "metadata": {"a": "b"}}
        whole = litellm.completion(**greedy)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**greedy, stream=True))
        assert text == whole.choices[0].message.content, (model, text, whole)
        called = litellm.completion(**asked, max_tokens=200, tools=[TOOL], tool_choice="required")
        [call] = called.choices[0].message.tool_calls
        check_call(call.function.name, json.loads(call.function.arguments))
        if not model.startswith("anthropic/"):  # there it is a tool that litellm makes up
            read = litellm.completion(**asked, max_tokens=200, response_format=Place)
            Place.model_validate_json(read.choices[0].message.content)


def langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    asked: Any = {"model": "tiny", "base_url": url + "/v1", "api_key": "none", "max_retries": 0}
    model = ChatOpenAI(**asked, max_tokens=8, temperature=0, reasoning_effort="low", verbosity="low", store=True)
    whole = model.invoke("Hello")
    assert "".join(chunk.content for chunk in model.stream("Hello")) == whole.content
    assert whole.usage_metadata["output_tokens"] == 8
    longer = ChatOpenAI(**asked, max_tokens=200)
    [call] = longer.bind_tools([TOOL], tool_choice="required").invoke("Hello").tool_calls
    check_call(call["name"], call["args"])
    for method in ("json_schema", "function_calling"):
        assert isinstance(longer.with_structured_output(Place, method=method).invoke("Hello"), Place)
    assert ChatOpenAI(**asked, max_tokens=8, temperature=0, use_responses_api=True).invoke("Hello").text == whole.text


def instructor(url: str) -> None:
    import instructor
    import openai

    modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
    for mode in modes:
        client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=mode)
        assert isinstance(client.create(model="tiny", response_model=Place, messages=SAY, max_retries=0), Place)
    *_, last = client.create_partial(model="tiny", response_model=Place, messages=SAY, max_retries=0)
    Place.model_validate(last.model_dump())


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    settings: Any = {"max_tokens": 200, "openai_reasoning_effort": "low", "parallel_tool_calls": False}
    for output in (NativeOutput(Place), ToolOutput(Place)):
        agent = Agent(model, output_type=output, model_settings=settings, retries=0)
        assert isinstance(agent.run_sync("Hello").output, Place)
    plain = Agent(model, model_settings={"max_tokens": 8, "temperature": 0})
    assert len(plain.run_sync("Hello").output) > 0


def check_call(name: str, arguments: Any) -> None:
    assert name == "look_up", name
    assert arguments["city"] in ("Paris", "Rome"), arguments


PROGRAMS = {
    program.__name__: program for program in (openai, anthropic, ollama, litellm, langchain, instructor, pydantic_ai)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2])
