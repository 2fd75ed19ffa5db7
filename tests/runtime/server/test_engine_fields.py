"""The fields that vLLM and SGLang take, each asking for something: here they mean the same, or are refused by name and
with a reason.

The names are those of the engines' request models: vLLM 0.32, `entrypoints/openai/{chat_completion,completion,
responses}/protocol.py` and `entrypoints/anthropic/protocol.py`; SGLang 0.5.23, `srt/entrypoints/{openai,anthropic}/
protocol.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.epp_io import small_bundle
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.fields import HARMLESS, NEUTRAL, REASONS
from treeline_runtime.server.formats import Formats
from treeline_runtime.server.jobs import Caller, Kind
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_wire.tokenizer import TokenizerBundle

LISTS: dict[tuple[str, Kind], str] = {
    ("vllm", "chat"): """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
        reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search
        top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
        ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
        truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
        add_generation_prompt continue_final_message add_special_tokens documents chat_template
        chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id
        session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
        return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params
        ec_transfer_params vllm_xargs repetition_detection stream_interval
    """,
    ("vllm", "completion"): """
        model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty
        watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
        allowed_token_ids prompt_logprobs logprob_token_ids bad_words prompt_embeds add_special_tokens
        response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
        return_token_ids routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs
        cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
        stream_interval
    """,
    ("vllm", "responses"): """
        background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream
        temperature text tool_choice tools top_logprobs top_p top_k min_p truncation user skip_special_tokens
        include_stop_str_in_output presence_penalty frequency_penalty prompt_cache_key watermarking request_id
        session_id media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs cache_salt
        enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop
        stop_token_ids ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs
    """,
    ("vllm", "messages"): """
        model messages max_tokens metadata output_config thinking stop_sequences stream system temperature
        tool_choice tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params
        ec_transfer_params vllm_xargs chat_template_kwargs
    """,
    ("sglang", "chat"): """
        bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank messages model
        frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
        response_format seed stop stream stream_options temperature top_p user tools tool_choice
        parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len
        return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids return_token_ids
        return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask
        sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
        reasoning_effort thinking task top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids
        stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path session_id
        session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
        min_dynamic_patch use_audio_in_video images_config video_config mm_processor_kwargs
        custom_logit_processor custom_params watermark input_ids rid extra_key cache_salt priority
        data_parallel_rank
    """,
    ("sglang", "completion"): """
        bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank model prompt
        best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user return_hidden_states return_routed_experts
        routed_experts_start_len return_cached_tokens_details return_spec_tokens_details return_token_ids
        top_k min_p min_tokens json_schema regex ebnf repetition_penalty stop_token_ids stop_regex
        no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params response_format
        custom_params custom_logit_processor watermark images_config mm_processor_kwargs data_parallel_rank
        rid extra_key cache_salt priority custom_labels
    """,
    ("sglang", "responses"): """
        bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank background include
        input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls
        previous_response_id reasoning service_tier store stream temperature text tool_choice tools
        top_logprobs top_p truncation user chat_template_kwargs request_id session_id priority extra_key
        cache_salt data_parallel_rank frequency_penalty presence_penalty stop top_k min_p repetition_penalty
    """,
    ("sglang", "messages"): """
        model messages max_tokens metadata stop_sequences stream system temperature thinking tool_choice tools
        top_k top_p output_config betas
    """,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


VALUES: dict[str, Any] = {
    **_each(
        "background echo ignore_eos include_stop_str_in_output no_stop_trim logprobs store "
        "return_cached_tokens_details return_flat_raw_output_top_logprobs return_hidden_states "
        "return_flat_raw_top_logprobs_b64 return_input_ids_in_sglext return_meta_info stream return_mm_kwargs "
        "return_output_ids_in_sglext return_prompt_text return_prompt_token_ids return_routed_experts "
        "return_sampling_mask return_spec_tokens_details return_token_ids return_token_offsets "
        "return_tokens_as_token_ids use_audio_in_video use_beam_search watermarking add_special_tokens "
        "enable_response_messages continue_final_message",
        True,
    ),
    **_each(
        "add_generation_prompt include_reasoning parallel_tool_calls separate_reasoning skip_special_tokens "
        "spaces_between_special_tokens stream_reasoning",
        False,
    ),
    **_each(
        "best_of bootstrap_port bootstrap_room disagg_prefill_dp_rank n "
        "max_completion_tokens max_dynamic_patch max_output_tokens max_tokens max_tool_calls "
        "min_dynamic_patch min_tokens priority prompt_logprobs seed top_k "
        "routed_experts_prompt_start routed_experts_start_len stream_interval thinking_token_budget "
        "top_logprobs truncate_prompt_tokens",
        2,
    ),
    **_each(
        "bootstrap_host cache_salt chat_template custom_logit_processor extra_key instructions lora_path "
        "mm_payload previous_response_id prompt_cache_key regex request_id rid sampling_logprobs_mode "
        "session_id stop stop_regex suffix system user",
        "a",
    ),
    **_each(
        "chat_template_kwargs custom_labels custom_params ec_transfer_params images_config kv_transfer_params "
        "media_io_kwargs metadata mm_processor_kwargs repetition_detection session_params video_config "
        "vllm_xargs watermark",
        {"a": "b"},
    ),
    **_each("data_parallel_rank routed_dp_rank", 0),
    **_each("frequency_penalty presence_penalty repetition_penalty temperature top_p min_p", 0.5),
    **_each("allowed_token_ids input_ids logprob_token_ids stop_token_ids", [2]),
    "bad_words": ["a"],
    "betas": ["a"],
    "documents": [{"title": "a", "text": "b"}],
    "ebnf": 'root ::= "a"',
    "include": ["reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"],
    "input": "hi",
    "json_schema": "{}",
    "length_penalty": 2.0,
    "logit_bias": {"2": 1},
    "messages": [{"role": "user", "content": "hi"}],
    "model": "m",
    "output_config": {"effort": "low"},
    "previous_input_messages": [{"role": "user"}],
    "prompt": "hi",
    "prompt_embeds": ["a"],
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "service_tier": "flex",
    "stop_sequences": ["a"],
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["a", "b"]},
    "task": "title",
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": "none",
    "tools": [TOOL],
    "truncation": "auto",
    "truncation_side": "left",
}
"""Values with an effect that a request would not have anyway."""
OTHERWISE: dict[tuple[Kind, str], Any] = {
    ("completion", "logprobs"): 2,
    ("completion", "add_special_tokens"): False,
    ("responses", "tools"): [{"type": "function", "name": "f", "parameters": {}}],
    ("messages", "tools"): [{"name": "f", "input_schema": {}}],
    ("messages", "tool_choice"): {"type": "none"},
    ("responses", "prompt"): {"id": "p"},
}
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "custom_params": {"custom_logit_processor": "a"},
    "vllm_xargs": {"custom_logit_processor": "a"},
}
"""Fields that a field needs, in chats and completions."""
DISAGGREGATION = {
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "kv_transfer_params",
    "ec_transfer_params",
}
NOT_BUILT = DISAGGREGATION | {
    *("use_beam_search", "watermarking", "watermark", "truncate_prompt_tokens", "logprob_token_ids"),
    *("return_tokens_as_token_ids", "return_prompt_text"),
    *("repetition_detection", "thinking_token_budget", "return_hidden_states", "return_routed_experts"),
    *("return_cached_tokens_details", "return_prompt_token_ids", "return_meta_info", "return_input_ids_in_sglext"),
    *("return_output_ids_in_sglext", "return_sampling_mask", "sampling_logprobs_mode", "lora_path"),
    *("return_flat_raw_output_top_logprobs", "session_params", "input_ids", "prompt_embeds"),
    *("best_of", "suffix", "background", "previous_response_id", "enable_response_messages"),
    "previous_input_messages",
}
REFUSED: dict[str, set[str]] = {
    "chat": NOT_BUILT | {"add_special_tokens", "thinking"},
    "completion": NOT_BUILT,
    "responses": NOT_BUILT | {"prompt", "vllm_xargs"},
    "messages": NOT_BUILT | {"vllm_xargs"},
}
NEEDED: dict[str, dict[str, Any]] = {
    "chat": {"messages": VALUES["messages"]},
    "completion": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": VALUES["messages"], "max_tokens": 5},
}
SOURCE = (
    "{{ documents }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ reasoning_effort }}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CASES = [
    pytest.param(kind, field, id=f"{engine}-{kind}-{field}")
    for (engine, kind), fields in LISTS.items()
    for field in fields.split()
]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    prompts = Prompts(TokenizerBundle.build(small_bundle().tokenizer_json, chat_template=SOURCE))
    yield Reader("m", prompts, SamplingDefaults(), formats=Formats("qwen3", "hermes"))
    prompts.close()


def read(reader: Reader, kind: Kind, **fields: Any) -> Any:
    """Read a request with these fields besides the required ones."""
    return reader.read(kind, json.dumps(NEEDED[kind] | fields).encode(), Limits(4096, 4096), Caller())


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_a_field_of_an_engine_is_taken_or_refused_with_a_reason(reader: Reader, kind: Kind, field: str) -> None:
    beside = BESIDE.get(field, {}) if kind in ("chat", "completion") else {}
    asked = {field: OTHERWISE.get((kind, field), VALUES[field])} | beside
    if field not in REFUSED[kind]:
        read(reader, kind, **asked)
        return
    with pytest.raises(ApiError) as refused:
        read(reader, kind, **asked)
    error = refused.value.body["error"]
    assert (refused.value.status, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    reason = "responses are not stored" if field == "previous_response_id" else REASONS[field]
    assert reason in error["message"]


def test_no_field_is_both_harmless_and_refused() -> None:
    assert not set(HARMLESS) & set(REASONS)
    assert not set(HARMLESS) & set(NEUTRAL)
    named = {field for fields in LISTS.values() for field in fields.split()}
    assert set(VALUES) == named, "a value for each, and none for others"


def test_the_engines_other_names_mean_the_same(reader: Reader) -> None:
    for kind in ("chat", "completion"):
        task = read(reader, kind, include_stop_str_in_output=True, request_id="mine", stop="x")
        assert task.rid == "mine"
        assert task.prompts[0].sampling.no_stop_trim
        with pytest.raises(ApiError, match="contradict"):
            read(reader, kind, request_id="mine", rid="yours")
        assert read(reader, kind, request_id="mine", rid="mine").rid == "mine"
    chat = read(reader, "responses", request_id="mine", include_reasoning=False, structured_outputs={"regex": "a+"})
    assert chat.rid == "mine"
    assert not chat.shown.reasoning
    grammar = chat.prompts[0].sampling.grammar
    assert (grammar.kind, grammar.source) == ("regex", "a+") or "a+" in grammar.source
    assert chat.prompts[0].sampling.grammar_param == "structured_outputs.regex"


@pytest.mark.parametrize(
    ("fields", "echo"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, ""),
        ({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}, "hi"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "b"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": t} for t in "bc"]}]}, "b\nc"),
        (
            {
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "b",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, ""),
    ],
)
def test_an_echo_precedes_the_answer(reader: Reader, fields: dict[str, Any], echo: str) -> None:
    assert read(reader, "chat", echo=True, **fields).echo == echo
    assert read(reader, "chat", **fields).echo == ""


def test_a_conversation_that_would_be_truncated_is_refused_as_such(reader: Reader) -> None:
    task = read(reader, "responses", truncation="auto", top_logprobs=3)
    shown = json.loads(task.repeated)
    assert (shown["truncation"], shown["top_logprobs"]) == ("auto", 3)
    for truncation, param in (("auto", "truncation"), ("disabled", "input")):
        with pytest.raises(ApiError, match="maximum context length") as refused:
            read(reader, "responses", input="a b " * 5000, truncation=truncation)
        error = refused.value.body["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    with pytest.raises(ApiError, match=r"'message.output_text.logprobs' is not available"):
        read(reader, "responses", include=["message.output_text.logprobs"])


def test_two_constraints_are_named_in_the_apis_own_words(reader: Reader) -> None:
    text = {"format": {"type": "json_object"}}
    with pytest.raises(ApiError, match=r"'text.format' and 'structured_outputs|structured_outputs.* and 'text.format'"):
        read(reader, "responses", text=text, structured_outputs={"regex": "a+"})


def test_the_engines_rank_counts_and_must_be_one_that_there_is(reader: Reader) -> None:
    def of(caller: Caller, **ranks: object) -> tuple[object, object]:
        body = json.dumps(NEEDED["chat"] | ranks).encode()
        task: Any = reader.read("chat", body, Limits(4096, 4096, dp_size=3), caller)
        return task.rank, task.ignored

    assert of(Caller(), data_parallel_rank=2, routed_dp_rank=2) == (2, ())
    assert of(Caller(), data_parallel_rank=1, routed_dp_rank=None) == (1, ())
    assert of(Caller(picked=True), routed_dp_rank=7) == (None, ("routed_dp_rank",)), (
        "behind our edge the picker names it"
    )
    with pytest.raises(ApiError, match="'routed_dp_rank': another field names rank 1"):
        of(Caller(), data_parallel_rank=1, routed_dp_rank=2)
    assert read(reader, "chat").rank is None
    for value in (1, -1, "0", 0.5, True):
        with pytest.raises(ApiError, match="there is one rank, 0") as refused:
            read(reader, "completion", routed_dp_rank=value)
        assert refused.value.body["error"]["param"] == "routed_dp_rank"
