"""The detokenizer process without its sockets."""

from __future__ import annotations

from typing import Any

import pytest
from treeline_runtime.detokenizer_process import LOGPROB_BYTES, MESSAGE_SIZE, DetokenizerCore, DetokenizerOutput
from treeline_runtime.messages import (
    BatchTextOut,
    BatchTokenOut,
    DetokenizeInit,
    FinishReason,
    HiddenStates,
    Reply,
    Speculated,
    StopReq,
    TextOut,
    TokenOut,
    decode_logprobs,
)

LENGTH = FinishReason("length")


def core() -> DetokenizerCore:
    """Tokens are character codes."""
    return DetokenizerCore(lambda ids, skip: "".join(map(chr, ids)))


def tokens(rid: str, text: str, finish: FinishReason | None = None) -> BatchTokenOut:
    return BatchTokenOut([TokenOut(rid, [ord(char) for char in text], finish)])


def texts(turn: DetokenizerOutput) -> list[TextOut]:
    return [out for message in turn.to_http if isinstance(message, BatchTextOut) for out in message.outs]


def test_outputs_that_arrive_before_their_init_wait_for_it() -> None:
    made = core()
    assert texts(made.take([tokens("a", "hi"), tokens("a", "!", LENGTH)])) == []
    outs = texts(made.take([DetokenizeInit("a")]))
    assert "".join(out.text for out in outs) == "hi!"
    assert outs[-1].finish == LENGTH
    assert not made._requests


def test_a_stop_string_ends_the_text_and_is_sent_to_the_scheduler_once() -> None:
    made = core()
    made.take([DetokenizeInit("a", stop=("END",))])
    turn = made.take([tokens("a", "some E"), tokens("a", "ND more")])
    outs = texts(turn)
    assert "".join(out.text for out in outs) == "some "
    assert outs[-1].finish == FinishReason("stop", matched="END")
    assert turn.to_scheduler == [StopReq("a", "END")]
    later = made.take([tokens("a", "even more"), tokens("a", "", FinishReason("stop", matched="END"))])
    assert (later.to_http, later.to_scheduler, made._requests) == ([], [], {})


def test_a_stop_string_in_the_last_output_is_not_sent_to_the_scheduler() -> None:
    made = core()
    made.take([DetokenizeInit("a", stop=("x",))])
    turn = made.take([tokens("a", "abx", LENGTH)])
    assert texts(turn)[0].finish == FinishReason("stop", matched="x")
    assert (turn.to_scheduler, made._requests) == ([], {})


@pytest.mark.parametrize("finish", [None, LENGTH])
def test_what_a_step_gave_after_a_stop_string_is_nowhere(finish: FinishReason | None) -> None:
    made = core()
    made.take([DetokenizeInit("a", stop=("x",))])
    logprobs = [(-float(i), ord(char)) for i, char in enumerate("abxcd")]
    states = None if finish is None else HiddenStates(0, 2, b"12345678" * 7)  # of 3 + 5 tokens, but for the last one
    out = TokenOut(
        "a",
        [token for _, token in logprobs],
        finish,
        output_token_logprobs=logprobs,
        output_top_logprobs=[[one] for one in logprobs],
        prompt_tokens=3,
        completion_tokens=5,
        speculated=Speculated(1, 7, 4),
        hidden_states=states,
    )
    (text,) = texts(made.take([BatchTokenOut([out])]))
    assert (text.text, text.token_ids, text.completion_tokens) == ("ab", [97, 98, 120], 3)
    told = decode_logprobs(text.logprobs[0])
    assert told.output_tokens == [(value, id, None) for value, id in logprobs[:3]]
    assert told.output_tops == [[(value, id, None)] for value, id in logprobs[:3]]
    assert text.speculated == Speculated(1, 7, 3), "the output has at most one token more than right guesses"
    assert finish is None or text.hidden_states == HiddenStates(0, 2, b"12345678" * 5)


@pytest.mark.parametrize("text", ["abx.", "abxc."])
def test_an_end_token_after_a_stop_string_does_not_count(text: str) -> None:
    made = core()
    made.take([DetokenizeInit("a", stop=("x",))])
    (out,) = texts(made.take([tokens("a", text, FinishReason("stop", matched=ord(".")))]))
    assert (out.text, out.token_ids, out.finish) == ("ab", [97, 98, 120], FinishReason("stop", matched="x"))


def test_an_abort_releases_what_was_held_back() -> None:
    made = core()
    made.take([DetokenizeInit("a", stop=("END",))])
    assert texts(made.take([tokens("a", "some E")]))[0].text == "some "
    assert texts(made.take([tokens("a", "", FinishReason("abort"))]))[0].text == "E"


def test_texts_of_a_turn_are_sent_as_one_message() -> None:
    made = core()
    made.take([DetokenizeInit("a"), DetokenizeInit("b")])
    turn = made.take([tokens("a", "x"), tokens("b", "y"), tokens("a", "z")])
    assert len(turn.to_http) == 1
    assert [out.rid for out in texts(turn)] == ["a", "b", "a"]


def test_texts_are_sent_in_order_in_messages_of_bounded_size() -> None:
    made = core()
    made.take([DetokenizeInit("a")])
    rounds = [tokens("a", f"{number % 10}") for number in range(MESSAGE_SIZE + 44)]
    turn = made.take([*rounds, Reply("q"), tokens("a", "!")])
    sizes = [len(message.outs) if isinstance(message, BatchTextOut) else message.id for message in turn.to_http]
    assert sizes == [MESSAGE_SIZE, 44, "q", 1]
    assert "".join(out.text for out in texts(turn)) == "0123456789" * 30 + "!"


LARGE = b"\0" * (LOGPROB_BYTES * 9)


@pytest.mark.parametrize(
    "extra", [{"vector": LARGE}, {"hidden_states": HiddenStates(0, 4, LARGE)}], ids=["vector", "states"]
)
def test_large_outputs_fill_messages_sooner(extra: dict[str, Any]) -> None:
    made = core()
    made.take([DetokenizeInit("a")])
    turn = made.take(BatchTokenOut([TokenOut("a", [], **extra)]) for _ in range(60))
    assert [len(message.outs) for message in turn.to_http if isinstance(message, BatchTextOut)] == [26, 26, 8]


def test_a_request_ended_by_a_stop_string_ends_again_with_the_schedulers_last_message() -> None:
    made = core()
    made.take([DetokenizeInit("a", stop=("END",), waits_for_end=True)])
    ended = made.take([tokens("a", "some END")])
    assert [(out.text, out.finish) for out in texts(ended)] == [("some ", None)]
    last = made.take([tokens("a", "", FinishReason("stop", matched="END"))])
    assert [(out.text, out.finish) for out in texts(last)] == [("", FinishReason("stop", matched="END"))]


def test_logprobs_carry_the_text_of_each_token_when_asked_for() -> None:
    out = TokenOut(
        "a",
        [104],
        output_token_logprobs=[(-1.0, 104)],
        output_top_logprobs=[[(-1.0, 104), (-2.0, 105)]],
        input_token_logprobs=[(None, 112)],
        input_top_logprobs=[None],
    )
    made = core()
    made.take([DetokenizeInit("a", return_logprob_text=True)])
    (shown,) = texts(made.take([BatchTokenOut([out])]))
    [logprobs] = map(decode_logprobs, shown.logprobs)
    assert logprobs.output_tokens == [(-1.0, 104, "h")]
    assert logprobs.output_tops == [[(-1.0, 104, "h"), (-2.0, 105, "i")]]
    assert (logprobs.input_tokens, logprobs.input_tops) == ([(None, 112, "p")], [None])


def test_a_long_prompts_logprobs_come_in_parts_with_the_rest_in_the_last() -> None:
    count = 2 * MESSAGE_SIZE + 7
    chosen: list[tuple[float | None, int]] = [(-float(i), 97 + i % 26) for i in range(count)]
    tops = [[one] for one in chosen]
    out = TokenOut("a", [104], FinishReason("length"), input_token_logprobs=chosen, input_top_logprobs=[*tops])
    made = core()
    made.take([DetokenizeInit("a")])
    shown = texts(made.take([BatchTokenOut([out])]))
    assert [(one.text, one.token_ids, one.finish is None) for one in shown] == [("", [], True)] * 2 + [
        ("h", [104], False)
    ]
    parts = [decode_logprobs(raw) for one in shown for raw in one.logprobs]
    assert [id for part in parts for _, id, _ in part.input_tokens or []] == [id for _, id in chosen]
    assert [len(part.input_tops or []) for part in parts] == [MESSAGE_SIZE, MESSAGE_SIZE, 7]


def test_withdrawn_ids_change_no_text_and_a_stop_string_ends_at_its_token() -> None:
    made = DetokenizerCore(lambda ids, skip: "".join(chr(id % 1000) for id in ids))
    made.take([DetokenizeInit("a", stop=("lo w",))])
    said = [ord(char) for char in "hello "]
    first = texts(made.take([BatchTokenOut([TokenOut("a", said, completion_tokens=6)])]))
    other = [1000 + ord(char) for char in "lo world"]
    turn = made.take([BatchTokenOut([TokenOut("a", other, completion_tokens=11, withdrawn=3)])])
    (last,) = texts(turn)
    assert "".join(out.text for out in [*first, last]) == "hel"
    assert (last.withdrawn, last.token_ids, last.completion_tokens) == (3, other[:4], 7)
    assert last.finish == FinishReason("stop", matched="lo w")
    assert turn.to_scheduler == [StopReq("a", "lo w")]
