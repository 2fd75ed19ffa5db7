"""Four pickers that share the requests of one trace choose as one that sees them all."""

from __future__ import annotations

import pytest
from support.peers import Pool, spread, trace_of

pytestmark = pytest.mark.deep

TRACE = trace_of(600, per_s=100.0)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_four_pickers_choose_as_one_and_spread_the_load_alike() -> None:
    one, four = Pool(1, 8), Pool(4, 8)
    one.run(TRACE)
    four.run(TRACE)
    assert one.same == one.asked == len(one.ttfts) == len(four.ttfts) == len(TRACE)
    assert four.same >= 0.95 * four.asked, four.same
    assert spread(four) <= 1.05 * spread(one), (spread(four), spread(one))
    computed = [sum(engine.computed for engine in pool.engines.values()) for pool in (one, four)]
    assert computed[1] <= 1.05 * computed[0], computed
    assert mean(four.ttfts) <= 1.05 * mean(one.ttfts), (mean(four.ttfts), mean(one.ttfts))
    assert four.network.sent_bytes < 140 * len(TRACE), "bytes sent to each of the others, heartbeats included"
    for node in four.nodes:
        node.gossip.check()
        assert node.gossip.elsewhere == len(node.gossip.own) == 0
        assert not any(endpoint.load.reservations for endpoint in node.picker.endpoints.values())


def test_without_gossip_four_pickers_choose_differently() -> None:
    """It proves that the test above can fail."""
    silent = Pool(4, 8, gossip=False)
    silent.run(TRACE[:200])
    assert silent.same < 0.8 * silent.asked
