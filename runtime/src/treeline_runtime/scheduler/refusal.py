"""Which requests are turned away, and with what words."""

from __future__ import annotations

from treeline_runtime.messages import MAX_HIDDEN_STATES_BYTES, FinishReason, GenerateReq
from treeline_runtime.sampling import check_sampling


def refusal(
    message: GenerateReq, *, vocab_size: int, longest_request: int, hidden_size: int | None
) -> FinishReason | None:
    """A 400 for what can never be served; None if it can.

    hidden_size: None where no request may have hidden states.
    """
    length = len(message.input_ids)
    problem: str | None
    if length == 0:
        problem = "the prompt is empty"
    elif length >= longest_request:
        problem = f"the prompt has {length} tokens; at most {longest_request - 1} fit, with one for the answer"
    elif not 0 <= min(message.input_ids) <= max(message.input_ids) < vocab_size:
        problem = f"the prompt has token ids outside the vocabulary of {vocab_size}"
    elif not -1 <= message.logprob_start_len < length:
        problem = f"logprob_start_len {message.logprob_start_len} is outside the prompt"
    elif message.top_logprobs_num < 0:
        problem = f"top_logprobs_num is negative: {message.top_logprobs_num}"
    elif message.return_hidden_states and (why := _without_hidden_states(message, hidden_size, longest_request)):
        problem = why
    else:
        problem = check_sampling(message.sampling, vocab_size)
    return None if problem is None else FinishReason("error", message=problem, status=400)


def _without_hidden_states(message: GenerateReq, hidden_size: int | None, longest_request: int) -> str | None:
    if hidden_size is None:
        return "return_hidden_states needs an engine that was started with enable_return_hidden_states"
    most = MAX_HIDDEN_STATES_BYTES // (4 * hidden_size)
    tokens = min(len(message.input_ids) + message.sampling.max_new_tokens, longest_request)
    if tokens > most:
        return f"hidden states of {tokens} tokens of prompt and output are too large for an answer: at most {most}"
    return None
