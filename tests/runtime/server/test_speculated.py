"""What answers and metrics say about guesses, by a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.runtime_server import ServerProcess, eventually, running
from treeline_runtime.published import LoadUpdate
from treeline_runtime.server.metrics import Metrics

TINY = Path(__file__).parents[3] / "models" / "tiny"
PROMPT: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 60, "temperature": 0}
AGAIN = {"ignore_eos": True}
"""The model then says the same again. Each request has a salt of its own, so none is guessed by the answers before it.
"""


def series(page: str) -> dict[str, float]:
    """Return the values of spec_ series, without the model's name."""
    found = re.findall(r'^treeline:(spec_\w+)\{model_name="m"(?:,position="(\d+)")?\} (\S+)$', page, re.MULTILINE)
    return {f"{name} {position}".strip(): float(value) for name, position, value in found}


def test_metrics_of_two_ranks_are_added() -> None:
    metrics = Metrics("m", ranks=2)
    for load in (
        LoadUpdate(total_drafts=2, total_draft_tokens=6, accepted_per_position=[2, 1]),
        LoadUpdate(total_drafts=4, total_draft_tokens=12, accepted_per_position=[3, 2, 1]),
    ):
        metrics.on_load(load, 0)
    metrics.on_load(LoadUpdate(total_drafts=1, total_draft_tokens=3, accepted_per_position=[1, 1, 1]), 1)
    assert series(metrics.render().decode()) == {
        "spec_decode_num_drafts_total": 5,
        "spec_decode_num_draft_tokens_total": 15,
        "spec_decode_num_accepted_tokens_total": 9,
        "spec_decode_num_accepted_tokens_per_pos_total 0": 4,
        "spec_decode_num_accepted_tokens_per_pos_total 1": 3,
        "spec_decode_num_accepted_tokens_per_pos_total 2": 2,
        "spec_accept_length": 1 + 9 / 5,
        "spec_accept_rate": 9 / 15,
    }


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(TINY, "--no-events", "--speculative-algorithm", "NGRAM", "--served-model-name", "m") as server:
        yield server


@pytest.mark.deep
def test_answers_say_what_was_guessed(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    short = client.completions.create(model="m", **PROMPT)
    assert short.usage is not None
    assert short.usage.completion_tokens_details is None, "nothing was guessed"
    long = client.completions.create(model="m", **PROMPT, extra_body=AGAIN | {"cache_salt": "a"})
    assert long.usage is not None
    details = long.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 30 < details.accepted_prediction_tokens < 60
    assert details.rejected_prediction_tokens is not None
    *_, last = client.completions.create(
        model="m",
        **PROMPT,
        extra_body=AGAIN | {"cache_salt": "b"},
        stream=True,
        stream_options={"include_usage": True},
    )
    assert last.usage == long.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})
    params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    body = {"text": PROMPT["prompt"], "sampling_params": params, "cache_salt": "c"}
    answer = httpx.post(f"{server.url}/generate", json=body).json()
    meta = answer["meta_info"]
    assert meta["spec_accept_token_num"] == details.accepted_prediction_tokens
    assert meta["spec_draft_token_num"] - meta["spec_accept_token_num"] == details.rejected_prediction_tokens
    assert meta["completion_tokens"] == 60 > meta["spec_accept_token_num"] + meta["spec_verify_ct"]
    right = 3 * details.accepted_prediction_tokens

    def told() -> dict[str, float]:
        return series(httpx.get(f"{server.metrics_url}/metrics").text)

    eventually(lambda: told()["spec_decode_num_accepted_tokens_total"] == right, what="all guesses are counted")
    assert told()["spec_accept_length"] > 3


@pytest.mark.deep
def test_a_stop_string_among_guesses_ends_the_text_there(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    whole = client.completions.create(model="m", **PROMPT, extra_body=AGAIN).choices[0].text
    stop = whole[-25:-15]
    cut = client.completions.create(model="m", **PROMPT, extra_body=AGAIN, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
