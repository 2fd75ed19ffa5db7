"""Every message survives the wire, and each process refuses messages of other processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from treeline_runtime import ipc, published
from treeline_runtime import messages as m

PARAMS = m.SamplingParams(stop=("a", "b"), stop_token_ids=(1,), logit_bias={3: -1.5}, seed=2**63, max_new_tokens=0)
LOGPROBS = m.Logprobs(input_tokens=[(None, 1, "x"), (-2.0, 2, None)])
FINISH = m.FinishReason("abort", message="gone", status=500)
EXAMPLES: dict[Any, list[Any]] = {
    m.decode_to_scheduler: [
        m.GenerateReq("r", [1, 2**31], PARAMS, namespace="lora", return_logprob=True, logprob_start_len=0),
        m.GenerateReq("r", [1], PARAMS, pools=True),
        m.AbortReq(),
        m.AbortReq("r"),
        m.AbortReq(["r", "s"]),
        m.HeardReq("h"),
        m.FlushReq("f"),
        m.StateReq("s", "radix"),
        m.DrainReq(),
        m.StopReq("r", "END"),
        m.SleepReq("i", 2),
        m.WakeReq("i"),
        m.UpdateWeightsReq("i", "/models/m"),
        m.StartProfileReq("i", "/traces", 5),
        m.StopProfileReq("i"),
    ],
    m.decode_to_detokenizer: [
        m.DetokenizeInit.of(m.GenerateReq("r", [1], PARAMS, return_logprob=True), "r#1"),
        m.BatchTokenOut(
            [
                m.TokenOut(
                    "r", [5], m.FinishReason("stop", matched=5), prompt_tokens=3, cached_tokens=2, completion_tokens=1
                ),
                m.TokenOut("v", [], m.FinishReason("length"), prompt_tokens=3, vector=b"\0\0\x80?"),
                m.TokenOut("h", [], FINISH, hidden_states=m.HiddenStates(2, 1, b"\0\0\0\0")),
                m.TokenOut(
                    "q",
                    [],
                    FINISH,
                    output_token_logprobs=[(-0.5, 7)],
                    output_top_logprobs=[[(-0.5, 7), (-1.0, 8)]],
                    input_token_logprobs=[(None, 1), (-2.0, 2)],
                    input_top_logprobs=[None, [(-2.0, 2)]],
                ),
            ]
        ),
        m.Reply("i", data={"blocks": [{"hash": str(2**64 - 1)}]}),
    ],
    ipc.decode_to_http: [
        m.BatchTextOut([m.TextOut("r", "text", [5], m.FinishReason("stop", matched="END"))]),
        m.BatchTextOut([m.TextOut("r", "", [], logprobs=[msgspec.Raw(m.encode(LOGPROBS))])]),
        m.BatchTextOut([m.TextOut("v", "", [], m.FinishReason("length"), vector=b"\0\0\x80?")]),
        m.Reply("f", ok=False, message="busy"),
        ipc.Ready("detokenizer", {}),
    ],
    ipc.decode_to_publisher: [
        published.CacheUpdate(
            [published.Stored([2**64 - 1], None, [1, 2], "ns", 1), published.Removed([1]), published.Cleared()]
        ),
        published.LoadUpdate(running=3, prefill_tokens_per_s=10.5, draining=True),
    ],
}


def test_messages_survive_the_wire() -> None:
    for decode, examples in EXAMPLES.items():
        for message in examples:
            assert decode(m.encode(message)) == message


def test_a_process_refuses_messages_of_other_processes() -> None:
    for decode in EXAMPLES:
        for other, examples in EXAMPLES.items():
            for message in examples:
                # some are for more than one process
                if other is not decode and not isinstance(message, m.Reply | m.DrainReq | m.BatchTextOut | m.HeardReq):
                    with pytest.raises(msgspec.ValidationError):
                        decode(m.encode(message))


def test_greedy_means_the_same_everywhere() -> None:
    assert m.SamplingParams(temperature=0.0).greedy
    assert m.SamplingParams(top_k=1).greedy
    assert not m.SamplingParams().greedy
