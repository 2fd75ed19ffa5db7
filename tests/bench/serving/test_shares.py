"""A load is split among processes."""

from hypothesis import given
from hypothesis import strategies as st
from treeline_bench.serving.messages import Conversation, Order, Turn
from treeline_bench.serving.processes import shares


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 20), st.booleans())
def test_every_conversation_is_sent_once_at_its_moment_and_no_process_is_idle(
    count: int, processes: int, concurrency: int, paced: bool
) -> None:
    conversations = [Conversation([Turn([index], 1, 1)]) for index in range(count)]
    moments = [0.1 * index for index in range(count)] if paced else None
    order = Order(
        host="h", port=1, path="/", conversations=conversations, arrivals=moments, concurrency=concurrency, seconds=3
    )
    parts = shares(order, processes)
    assert len(parts) <= processes
    sent = [turn.piece[0] for part in parts for each in part.conversations for turn in each.turns]
    assert sorted(sent, key=int) == list(range(count))
    assert all(part.conversations and part.seconds == 3 for part in parts)
    if paced:
        timed = [pair for part in parts for pair in zip(part.arrivals or [], part.conversations, strict=True)]
        assert all(moment == 0.1 * int(each.turns[0].piece[0]) for moment, each in timed)
    else:
        assert sum(part.concurrency for part in parts) == concurrency
        assert all(part.concurrency >= 1 for part in parts)
