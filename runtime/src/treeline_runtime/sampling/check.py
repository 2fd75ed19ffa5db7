"""Are these parameters something one can sample with?"""

from __future__ import annotations

import math

from treeline_runtime.messages import MAX_STOP_TOKEN_IDS, SamplingParams


def check_sampling(params: SamplingParams, vocab_size: int) -> str | None:
    """→ what is wrong, for the user; None if nothing is."""
    wrong = {
        "max_new_tokens": params.max_new_tokens < 0,
        "min_new_tokens": params.min_new_tokens < 0,
        "temperature": not (0 <= params.temperature < math.inf),
        "top_p": not (0 <= params.top_p <= 1),
        "top_k": params.top_k < -1,
        "min_p": not (0 <= params.min_p <= 1),
        "frequency_penalty": not math.isfinite(params.frequency_penalty),
        "presence_penalty": not math.isfinite(params.presence_penalty),
        "repetition_penalty": not (0 < params.repetition_penalty < math.inf),
    }
    for name, bad in wrong.items():
        if bad:
            return f"{name} is out of range: {getattr(params, name)}"
    if params.min_new_tokens > params.max_new_tokens:
        return f"min_new_tokens {params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}"
    if params.min_new_tokens and params.grammar is not None:
        return "min_new_tokens beside a grammar, which says itself where it ends"
    if params.logit_bias:
        for token, bias in params.logit_bias.items():
            if not 0 <= token < vocab_size:
                return f"logit_bias names token {token}; the vocabulary has {vocab_size}"
            if math.isnan(bias) or bias == math.inf:
                return f"logit_bias of token {token} is {bias}"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        return f"stop_token_ids has {len(params.stop_token_ids)} tokens; at most {MAX_STOP_TOKEN_IDS} are looked for"
    named = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                return f"{name} names token {token}; the vocabulary has {vocab_size}"
    if not all(params.bad_words):
        return "bad_words has one without tokens"
    return None
