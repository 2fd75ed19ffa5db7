"""A peer's state, as applied here, always equals its state at one moment, in any order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.peers.sequence import ASK_AGAIN_S, GAP_S, MOST_WAITING, NOTHING, News, Sequence
from treeline_wire.peers import Closed, Delta, How, Opened, Snapshot

REF = b"abcd"


def opened(number: int) -> Opened:
    return Opened(number, REF, 1, 1)


class Applied:
    """The numbers of the applied deltas, each of which opens one request."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def take(self, news: News) -> None:
        if news.snapshot is not None:
            self.numbers = [record.id for record in news.snapshot]
        self.numbers += [record.id for record in news.records]


def answer(nonce: bytes, seq: int, parts: int) -> list[Snapshot]:
    """Return a snapshot with all deltas up to this number, in `parts` parts."""
    records = [opened(number) for number in range(1, seq + 1)]
    each = -(-len(records) // parts) or 1
    return [Snapshot(nonce, seq, at, parts, tuple(records[at * each : (at + 1) * each])) for at in range(parts)]


@given(st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=120), st.integers(1, 4))
def test_deltas_are_applied_once_in_order_and_missing_ones_are_requested(
    arrivals: list[int | None], parts: int
) -> None:
    """A number is an arriving delta; None lets time pass, and questions of that time are answered."""
    sequence, applied, now, sent = Sequence(0.0), Applied(), 0.0, 0
    for arrival in arrivals:
        if arrival is not None:
            sent = max(sent, arrival)
            applied.take(sequence.on_delta(Delta(arrival, (opened(arrival),)), now))
        else:
            now += max(GAP_S, ASK_AGAIN_S)
            nonce = sequence.question(now)
            if nonce is not None:
                pieces = answer(nonce, sent, parts)
                for piece in (*reversed(pieces), pieces[0]):
                    applied.take(sequence.on_part(piece, now))
                assert applied.numbers == list(range(1, sent + 1)), "an answer is all that there was"
        assert applied.numbers == list(range(1, len(applied.numbers) + 1)), "never around a gap"
    if sequence.in_step:
        now += ASK_AGAIN_S
        assert (sequence.question(now) is None) == (len(applied.numbers) == sent), (
            "asked for where something is missing"
        )


def test_only_the_answer_to_the_last_question_counts() -> None:
    sequence = Sequence(0.0)
    first = sequence.question(0.0)
    assert sequence.question(ASK_AGAIN_S / 2) is None
    second = sequence.question(ASK_AGAIN_S)
    assert first is not None
    assert second is not None
    assert sequence.on_part(answer(first, 3, 1)[0], 1.0) == NOTHING
    whole = answer(second, 4, 2)
    assert sequence.on_part(whole[0], 1.0) == NOTHING
    assert sequence.on_part(Snapshot(second, 5, 1, 2), 1.0) == NOTHING, "of another moment"
    assert sequence.on_part(whole[1], 1.0).snapshot is not None
    assert sequence.on_part(whole[1], 1.0) == NOTHING


def test_deltas_that_wait_for_a_missing_one_are_bounded() -> None:
    sequence = Sequence(0.0)
    nonce = sequence.question(0.0)
    assert nonce is not None
    sequence.on_part(answer(nonce, 0, 1)[0], 0.0)
    for seq in range(2, 3 * MOST_WAITING):
        assert sequence.on_delta(Delta(seq, (Closed(seq, How.FAILED),)), 0.0) == News(None, ())
        assert len(sequence._waiting) <= MOST_WAITING
    assert sequence.question(1.0) is not None
