"""The pickers' reports of demand: one line each, and the sum of several."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_wire.signals import MOST_COUNT, Asked, PoolSignals, Signals, Waiting, decode, encode, merged

counts = st.integers(0, MOST_COUNT // 8)
waiting = st.builds(Waiting, counts, counts)
times = st.none() | st.floats(0, 1e9)
asked = st.builds(Asked, waiting, waiting, counts, times, times, st.floats(0, 1e9))
pools = st.builds(PoolSignals, asked, st.dictionaries(st.text(max_size=3), asked, max_size=2), *[counts] * 5)

BEFORE_PROMPTS = (
    b'{"synced":true,"pools":{"p":{"asked":{"held":{"requests":2,"tokens":900},"missed":{"requests":0,"tokens":0},'
    b'"picks":3,"ttft_p50_s":0.25,"ttft_p90_s":1.5},"models":{},"ready":1,"queued_tokens":4096,'
    b'"in_flight_requests":7,"in_flight_tokens":512,"silent":1}}}\n'
)
GOLDEN = BEFORE_PROMPTS.replace(b'"ttft_p90_s":1.5', b'"ttft_p90_s":1.5,"prompt_load":0.0')


def test_the_format_of_a_line_is_fixed() -> None:
    said = Signals(True, {"p": PoolSignals(Asked(Waiting(2, 900), Waiting(), 3, 0.25, 1.5), {}, 1, 4096, 7, 512, 1)})
    assert (encode(said), decode(GOLDEN), decode(BEFORE_PROMPTS)) == (GOLDEN, said, said)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=5), pools, max_size=2))
def test_a_line_round_trips(said: dict[str, PoolSignals]) -> None:
    line = encode(Signals(True, said))
    assert line.count(b"\n") == 1
    assert decode(line) == Signals(True, said)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"pools":{"p":{"queued_tokens":-1}}}',
        b'{"pools":{"p":{"queued_tokens":1e300}}}',
        b'{"pools":{"p":{"asked":{"ttft_p90_s":1e400}}}}',
        b'{"pools":{"p":{"asked":{"picks":true}}}}',
        b'{"pools":{"p":7}}',
        b'{"x":' + b"[" * 100_000,
        b'{"pools":{"\xff":{}}}',
    ],
)
def test_an_invalid_line_is_a_typed_error(line: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(line)


def test_additions_of_later_versions_are_ignored() -> None:
    assert decode(b'{"synced":true,"new":[1],"pools":{"p":{"new":{}}}}') == Signals(True, {"p": PoolSignals()})


@given(st.lists(pools, max_size=3))
def test_several_pickers_share_endpoints_and_have_their_own_requests(told: list[PoolSignals]) -> None:
    whole = merged(told)
    assert merged(reversed(told)) == whole
    assert whole.asked.held.requests == sum(one.asked.held.requests for one in told)
    assert whole.asked.missed.tokens == sum(one.asked.missed.tokens for one in told)
    assert whole.in_flight_tokens == max([one.in_flight_tokens for one in told], default=0), "each hears of the others"
    assert whole.queued_tokens == max([one.queued_tokens for one in told], default=0)
    assert whole.silent == min([one.silent for one in told], default=0)
    assert set(whole.models) == {name for one in told for name in one.models}
    if len(told) == 1:
        assert whole == told[0]
