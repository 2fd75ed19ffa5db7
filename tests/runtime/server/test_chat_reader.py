"""Requests are translated for the engine: grammars, special tokens, and the parsing of their outputs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runtime_server import make_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from treeline_runtime.args import parse_args
from treeline_runtime.config import ConfigError
from treeline_runtime.frontend import ServedModel, ServeError
from treeline_runtime.messages import Grammar, SamplingParams
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.fields import check_messages
from treeline_runtime.server.formats import Formats, Parsing, formats_of
from treeline_runtime.server.jobs import Caller, ChatTask, CompletionTask, GenerateTask, Shown
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_wire.chat import NeedsWorkerError
from treeline_wire.tokenizer import TokenizerBundle

LIMITS = Limits(context_length=4096, max_request_tokens=4096)
TEMPLATE = (
    "{{ messages[0].content }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ '\nassistant\n' }}"
    "{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}
OTHER = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}
REGEX = {"regex": "a+"}
HERMES = Formats("qwen3", "hermes")
HARMONY = Formats("gpt_oss", "openai")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return (folder / "tokenizer.json").read_text()


def reader(tokenizer: str, formats: Formats = HERMES, template: str = TEMPLATE) -> Reader:
    prompts = Prompts(TokenizerBundle.build(tokenizer, chat_template=template))
    return Reader("m", prompts, SamplingDefaults(), None, formats)


def read(made: Reader, kind: Any, **body: Any) -> Any:
    return made.read(kind, msgspec.json.encode(body), LIMITS, Caller())


def chat(made: Reader, **body: Any) -> ChatTask:
    task = read(made, "chat", messages=[{"role": "user", "content": "hi"}], **body)
    assert isinstance(task, ChatTask)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=ChatTask)
    assert again == task, "it goes from process to process"
    return task


def sampling(task: ChatTask | CompletionTask | GenerateTask) -> SamplingParams:
    return task.prompts[0].sampling


def grammar(made: Reader, **body: Any) -> Grammar | None:
    return sampling(chat(made, **body)).grammar


def structure(made: Reader, **body: Any) -> Any:
    found = grammar(made, **body)
    assert found is not None
    assert (found.kind, found.after) == ("structural_tag", "")
    tag = json.loads(found.source)
    assert tag["type"] == "structural_tag"
    return tag["format"]


def refused(made: Reader, param: str, **body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        chat(made, **body)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)
    return str(caught.value)


def test_every_api_asks_the_engine_for_the_same_grammar(tokenizer: str) -> None:
    made = reader(tokenizer, Formats())
    expected = Grammar("regex", "a+")
    assert grammar(made, **REGEX) == expected
    completion = read(made, "completion", prompt=["a", "b"], guided_regex="a+", ignore_eos=True)
    assert [prompt.sampling.grammar for prompt in completion.prompts] == [expected] * 2
    assert not sampling(completion).ignore_eos, "an end that the grammar permits is one"
    params = [{"regex": "a+"}, {"max_new_tokens": 3}]
    native = read(made, "generate", text=["a", "b"], sampling_params=params)
    assert [prompt.sampling.grammar for prompt in native.prompts] == [expected, None]
    assert grammar(made) is None
    assert sampling(chat(made, ignore_eos=True)).ignore_eos


@pytest.mark.parametrize("kind", ["completion", "generate"])
def test_output_settings_of_many_generations_are_bounded(tokenizer: str, kind: str) -> None:
    made, bodies = reader(tokenizer), list[dict[str, Any]]()
    for fields in (
        {"stop": [f"{i:x>1024}" for i in range(64)]},
        {"logit_bias": {str(i): 1.5 for i in range(399)}, "stop": ["a" * 1024] * 12},
        {"regex": "a" * 20_000},
        {"custom_logit_processor": "p", "custom_params": {"words": "a" * 20_000}},
    ):
        bodies.append(fields if kind == "completion" else {"sampling_params": fields})
    for body in bodies:
        prompts = {"prompt" if kind == "completion" else "text": ["a"] * 1024}
        with pytest.raises(ApiError, match="too large for 1024 generations") as caught:
            read(made, kind, **prompts, **body)
        assert caught.value.status == 400
        assert read(made, kind, **{name: texts[:8] for name, texts in prompts.items()}, **body).generations == 8


def test_each_prompt_of_a_batch_has_its_own_params_or_those_of_all(tokenizer: str) -> None:
    made = reader(tokenizer)
    params = [{"temperature": 0.5, "regex": "a"}, None, {"temperature": 0.25}, {"temperature": 0.25}]
    native = read(made, "generate", text=["a"] * 4, sampling_params=params)
    told = [(one.sampling.temperature, one.sampling.grammar is not None) for one in native.prompts]
    assert told == [(0.5, True), (1.0, False), (0.25, False), (0.25, False)]


def test_stop_tokens_are_sent_once_and_shared_by_all_choices(tokenizer: str) -> None:
    task = read(reader(tokenizer), "completion", prompt="a", n=3, seed=1, stop_token_ids=[5, 6, 5] * 40)
    first, *others = task.requests()
    assert first.sampling.stop_token_ids == (5, 6)
    assert all(other.sampling.stop_token_ids is first.sampling.stop_token_ids for other in others)


def test_a_grammar_determines_its_own_end(tokenizer: str) -> None:
    made = reader(tokenizer)
    assert "'min_tokens' and 'regex' contradict" in refused(made, "min_tokens", min_tokens=2, **REGEX)
    assert grammar(made, min_tokens=0, **REGEX) is not None
    with pytest.raises(ApiError) as caught:
        read(made, "generate", text="a", sampling_params={"min_new_tokens": 1, "ebnf": 'root ::= "a"'})
    assert caught.value.body["error"]["param"] == "sampling_params.min_new_tokens"


def test_a_constraint_that_would_be_copied_too_often_is_refused(tokenizer: str) -> None:
    made = reader(tokenizer, Formats())
    large = "a" * (1 << 20)
    assert grammar(made, regex=large, n=15) is not None
    refused(made, "regex", regex=large, n=16)
    for kind, body in (
        ("completion", {"prompt": ["a"] * 17, "regex": large}),
        ("generate", {"text": ["a"] * 17, "sampling_params": {"regex": large}}),
    ):
        with pytest.raises(ApiError, match="too large for 17 generations"):
            read(made, kind, **body)


def test_a_constraint_does_not_hold_for_reasoning(tokenizer: str) -> None:
    made = reader(tokenizer)
    expected = Grammar("regex", "a+")
    assert grammar(made, chat_template_kwargs={"enable_thinking": True}, **REGEX) == Grammar("regex", "a+", "</think>")
    assert grammar(made, reasoning_effort="none", **REGEX) == expected
    assert grammar(reader(tokenizer, Formats(None, "hermes")), **REGEX) == expected
    whole = structure(made, **REGEX)
    assert whole["type"] == "sequence"
    thinking, answer = whole["elements"]
    assert thinking["type"] == "optional"
    assert [thinking["content"]["elements"][0][name] for name in ("begin", "end")] == ["<think>", "</think>"]
    assert answer == {"type": "regex", "pattern": "a+"}


def test_only_calls_that_are_required_or_strict_are_constrained(tokenizer: str) -> None:
    made = reader(tokenizer, Formats(None, "hermes"))
    assert grammar(made, tools=[TOOL, OTHER]) is None
    assert grammar(made, tools=[STRICT], tool_choice="none") is None
    for more in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": [STRICT, OTHER]}):
        found = json.dumps(structure(made, **{"tools": [TOOL, OTHER], **more}))
        assert "<tool_call>" in found
        assert ('{\\"name\\": \\"g\\"' in found) == (more.get("tool_choice") != NAMED)
        assert '"x": {"type": "integer"}' in found


def test_a_constrained_answer_may_be_calls_instead(tokenizer: str) -> None:
    made = reader(tokenizer, Formats(None, "hermes"))
    either = structure(made, tools=[TOOL], response_format={"type": "json_object"})
    assert either["type"] == "or"
    said, called = either["elements"]
    assert said == {"type": "json_schema", "json_schema": {"type": "object"}}
    assert called == structure(made, tools=[TOOL], tool_choice="required")
    required = structure(made, tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert required == called
    assert grammar(made, tools=[TOOL], tool_choice="none", **REGEX) == Grammar("regex", "a+")


def test_harmony_combines_reasoning_answer_and_calls(tokenizer: str) -> None:
    made = reader(tokenizer, HARMONY)
    assert grammar(made, **REGEX) == Grammar("regex", "a+", "<|channel|>final<|message|>")
    assert structure(made, tools=[TOOL], tool_choice="required")
    refused(made, "regex", tools=[TOOL], **REGEX)
    refused(made, "separate_reasoning", separate_reasoning=False)


def test_outputs_are_parsed_by_the_requests_settings(tokenizer: str) -> None:
    made = reader(tokenizer)
    assert chat(reader(tokenizer, Formats())).parsing is None
    task = chat(made)
    assert task.parsing == Parsing("qwen3", None, {}, "hi\nassistant\n")
    assert sampling(task).skip_special_tokens, "nothing of it is written with special tokens"
    task = chat(made, tools=[TOOL, OTHER], parallel_tool_calls=False, stream_reasoning=False)
    assert task.parsing == Parsing("qwen3", "hermes", {"f": PARAMETERS, "g": {}}, "hifg\nassistant\n")
    assert task.shown == Shown(reasoning_at_once=True, several_calls=False)
    assert not sampling(task).skip_special_tokens
    assert chat(made, tools=[TOOL], tool_choice="none", separate_reasoning=False).parsing is None
    assert chat(made, skip_special_tokens=False, include_reasoning=False).shown == Shown(
        reasoning=False, special_tokens=True
    )


def test_tools_need_a_template_and_a_parser(tokenizer: str) -> None:
    assert "--tool-call-parser" in refused(reader(tokenizer, Formats("qwen3")), "tools", tools=[TOOL])
    assert "no place" in refused(reader(tokenizer, HERMES, "{{ messages[0].content }}"), "tools", tools=[TOOL])
    tokens = [
        read(reader(tokenizer), "tokenize", messages=[{"role": "user", "content": "hi"}], tools=t) for t in ([TOOL], [])
    ]
    shown = [Tokenizer.from_str(tokenizer).decode(json.loads(answer.body)["tokens"]) for answer in tokens]
    assert shown == ["hif\nassistant\n", "hi\nassistant\n"]


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        ("{{ reasoning_effort }}", ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]),
        ("{% if enable_thinking is defined and enable_thinking %}x{% endif %}", ["none", "low", None]),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", ["none", "high"]),
        ("{% set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}", ["none", "high"]),
        ("{{ messages[0].content }}", ["none", None]),
    ],
)
def test_an_effort_reaches_templates_that_use_it(tokenizer: str, template: str, efforts: list[str | None]) -> None:
    made = reader(tokenizer, Formats(), template + "hi")
    for effort in efforts:
        assert chat(made, reasoning_effort=effort)
    for wrong in ("huge", 5, ["low"], True):
        refused(made, "reasoning_effort", reasoning_effort=wrong)


def test_an_effort_that_the_template_does_not_know_is_ignored(tokenizer: str) -> None:
    """A member of that name is none of its variables."""
    made = reader(tokenizer, Formats(), "{{ messages[0].content }}{% if false %}{{ messages[0].thinking }}{% endif %}")
    assert chat(made, reasoning_effort="low").ignored == ("reasoning_effort",)
    refused(made, "reasoning_effort", reasoning_effort="a bit")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", Formats()),
        ("<tool_call>", Formats(None, "hermes")),
        ("<think><tool_call>", Formats("qwen3", "hermes")),
        ("{{ content.split('</think>')[-1] }}", Formats()),
        ("<tool_call><function=f><parameter=", Formats(None, "qwen3_coder")),
        ("<tool_call>f<arg_key>", Formats()),
        ("[TOOL_CALLS][THINK]", Formats("mistral", "mistral")),
        ("<|python_tag|>", Formats(None, "llama3_json")),
        ("<｜tool▁calls▁begin｜><think>", Formats("qwen3", "deepseek_v31")),
        ("<｜tool▁calls▁begin｜>```json", Formats(None, "deepseek_v3")),
        ("<|start|>assistant<|channel|>analysis", Formats("gpt_oss", "openai")),
    ],
)
def test_formats_are_guessed_from_the_template(tokenizer: str, template: str, expected: Formats) -> None:
    bundle = TokenizerBundle.build(tokenizer, chat_template=template)
    assert formats_of(bundle, "auto", "auto") == expected
    assert formats_of(TokenizerBundle.build(tokenizer, tool_template=template), "auto", "auto") == expected
    assert formats_of(bundle, "none", "none") == Formats()
    assert formats_of(bundle, "deepseek-r1", "pythonic") == Formats("deepseek_r1", "pythonic")


def test_an_unknown_format_is_named(tokenizer: str) -> None:
    bundle = TokenizerBundle.build(tokenizer)
    for reasoning, tools in (("hermit", "none"), ("none", "hermit")):
        with pytest.raises(ConfigError, match=r"unknown .* parser 'hermit'; known: "):
            formats_of(bundle, reasoning, tools)


def test_a_server_does_not_start_with_an_unknown_format(model: Path) -> None:
    args = parse_args(["--model", str(model), "--tool-call-parser=hermit"])
    with pytest.raises(ServeError, match=r"^unknown tool call parser .hermit.; known: .*hermes"):
        ServedModel.read(args, model)
    found = ServedModel.read(parse_args(["--model", str(model), "--reasoning-parser=deepseek-r1"]), model)
    assert found.formats == Formats("deepseek_r1")


def test_an_answer_may_return_with_the_fields_that_clients_keep() -> None:
    kept = {"parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}, "reasoning_details": [{"text": "x"}]}
    check_messages([{"role": "assistant", "content": "hi", **kept, "thinking_blocks": [{}]}], lambda name: False)
    for role in ("user", "tool"):
        with pytest.raises(ApiError, match="parsed"):
            check_messages([{"role": role, "content": "hi", **kept}], lambda name: False)


# ---- templates that come with requests ------------------------------------------------------------------------------

GIVEN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% for d in documents or [] %}<{{ d.text }}>{% endfor %}"
)


def prompt_of(made: Reader, **body: Any) -> str:
    return made.prompts.decode(chat(made, **body).prompts[0].input_ids, skip_special_tokens=False)


def test_a_given_template_replaces_the_models_and_renders_as_in_transformers(tokenizer: str) -> None:
    made = reader(tokenizer)
    judge = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer), **made.prompts.bundle.special_tokens
    )
    documents = [{"text": "one"}, {"text": "two"}]
    expected = judge.apply_chat_template(
        [{"role": "user", "content": "hi"}], chat_template=GIVEN, documents=documents, tokenize=False
    )
    assert prompt_of(made, chat_template=GIVEN, documents=documents) == expected == "[user]hi<one><two>"
    assert prompt_of(made) == prompt_of(made, chat_template=TEMPLATE)
    assert chat(made, chat_template=GIVEN, documents=documents).ignored == ()
    asks = "{% if enable_thinking %}think{% endif %}{{ messages[0].content }}"
    assert prompt_of(made, chat_template=asks, reasoning_effort="low") == "thinkhi"
    tokens = read(made, "tokenize", messages=[{"role": "user", "content": "hi"}], chat_template=GIVEN)
    assert msgspec.json.decode(tokens.body)["count"] == len(chat(made, chat_template=GIVEN).prompts[0].input_ids)


def test_documents_are_ignored_if_the_template_does_not_use_them(tokenizer: str) -> None:
    assert chat(reader(tokenizer), documents=[{"text": "x"}]).ignored == ("documents",)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "does not compile"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "needs more than"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages[0].content * 999999999 }}", "needs more than"),
        ("{{" + "(" * 20_000, ""),
        ("x" * 40_000, "32768"),
    ],
)
def test_the_work_of_a_given_template_is_bounded(tokenizer: str, template: str, said: str) -> None:
    made = reader(tokenizer)
    with pytest.raises(ApiError) as caught:
        chat(made, chat_template=template)
    assert caught.value.status == 400
    assert said in caught.value.body["error"]["message"]


def test_a_given_template_is_not_read_in_an_event_loop(tokenizer: str) -> None:
    async def asks() -> None:
        with pytest.raises(NeedsWorkerError):
            chat(reader(tokenizer), chat_template=GIVEN, reasoning_effort="low")
        with pytest.raises(NeedsWorkerError):
            read(reader(tokenizer), "tokenize", messages=[{"role": "user", "content": "hi"}], chat_template=GIVEN)

    asyncio.run(asks())
