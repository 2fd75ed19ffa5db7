"""Fields of OpenAI's API, vLLM and SGLang that would change an answer and are not built: why, and what to do instead.

Read in the engines' request models: vLLM 0.32 (`entrypoints/openai/{chat_completion,completion,responses}/protocol.py`,
`entrypoints/anthropic/protocol.py`), SGLang 0.5.23 (`srt/entrypoints/{openai,anthropic}/protocol.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STORE: Final = "nothing is stored: send the whole conversation each time"
_DISAGGREGATION: Final = "prompts are computed where their answer is"
_OF_LOGPROBS: Final = "what is told of log probabilities is 'logprobs' and 'top_logprobs'"
_WATERMARK: Final = "outputs have no watermarks"
_EXPERTS: Final = "which experts computed a token is not told"
_ADAPTER: Final = "there are no LoRA adapters"
_CUT: Final = "prompts are never cut: send what is to be read"
_OLD_CALLS: Final = "OpenAI's older form: use 'tools' and 'tool_choice'"
_TOKENS: Final = "'return_token_ids' tells the tokens of prompt and answer"

REASONS: Final[Mapping[str, str]] = {
    "add_special_tokens": "the chat template writes all special tokens of a chat",
    "audio": "answers are text",
    "background": _STORE,
    "best_of": "use 'n', and choose",
    "bootstrap_host": _DISAGGREGATION,
    "bootstrap_port": _DISAGGREGATION,
    "bootstrap_room": _DISAGGREGATION,
    "context_management": "nothing of a conversation is left out here",
    "conversation": _STORE,
    "disagg_prefill_dp_rank": _DISAGGREGATION,
    "ec_transfer_params": _DISAGGREGATION,
    "enable_response_messages": _TOKENS,
    "function_call": _OLD_CALLS,
    "functions": _OLD_CALLS,
    "guided_whitespace_pattern": "JSON is written as json.dumps does",
    "input_ids": "a chat has messages; /generate and /v1/completions take token ids",
    "kv_transfer_params": _DISAGGREGATION,
    "logprob_token_ids": _OF_LOGPROBS,
    "lora_path": _ADAPTER,
    "modalities": "answers are text",
    "personality": "the style is the prompt's to say: 'instructions'",
    "previous_input_messages": "send them as 'input'",
    "previous_response": "send its output as 'input'",
    "prompt": "nothing is stored that it could name: send the text itself, as this path takes it",
    "prompt_embeds": "prompts are texts or token ids",
    "reasoning": "use 'reasoning_effort'",
    "repetition_detection": "use 'frequency_penalty', or 'max_tokens'",
    "return_cached_tokens_details": "how much was cached is in the usage",
    "return_flat_raw_output_top_logprobs": _OF_LOGPROBS,
    "return_hidden_states": "/generate tells them, where the server was started with --enable-return-hidden-states",
    "return_input_ids_in_sglext": _TOKENS,
    "return_meta_info": _TOKENS,
    "return_output_ids_in_sglext": _TOKENS,
    "return_prompt_text": _TOKENS,
    "return_prompt_token_ids": _TOKENS,
    "return_routed_experts": _EXPERTS,
    "return_sampling_mask": _OF_LOGPROBS,
    "return_tokens_as_token_ids": _TOKENS,
    "sampling_logprobs_mode": _OF_LOGPROBS,
    "session_params": "sessions are not kept: prefixes are found without",
    "suffix": "text is not filled in: write the model's own markers into the prompt",
    "thinking": "use 'reasoning_effort', or 'chat_template_kwargs' with what the template reads",
    "thinking_token_budget": "use 'reasoning_effort'",
    "truncate_prompt_tokens": _CUT,
    "use_beam_search": "use 'n'",
    "vllm_xargs": "logit processors are for chats, completions and /generate",
    "watermark": _WATERMARK,
    "watermarking": _WATERMARK,
    "web_search_options": "built-in tools are not served here",
}
"""By name; what a name means does not depend on the path."""
