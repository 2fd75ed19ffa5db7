"""The routing mode of pools, and its log lines: one for each change."""

from __future__ import annotations

import pytest
from treeline_epp.requests.routing_ways import Routing, RoutingWays, TokenizerFacts, Way, way_of

GOOD = TokenizerFacts(known=True, has_keys=True)


@pytest.mark.parametrize(
    ("publishes", "keys_missing", "tokenizer", "way", "reason", "said"),
    [
        (True, False, GOOD, "events", "", ""),
        (True, False, GOOD._replace(problem="its template fails"), "events", "", "its template fails"),
        (False, False, GOOD, "history", "NoEvents", "publishes no KV events"),
        (False, False, TokenizerFacts(), "history", "NoEvents", "publishes no KV events"),
        (True, True, GOOD, "history", "NoKeyPair", "--curve-dir"),
        (True, False, TokenizerFacts(), "history", "NoTokenizer", "--tokenizer MODEL=URI"),
        (True, False, TokenizerFacts(awaited=True), "history", "TokenizerUnavailable", "is being fetched"),
        (
            True,
            False,
            TokenizerFacts(awaited=True, problem="x is gated"),
            "history",
            "TokenizerUnavailable",
            "x is gated",
        ),
        (True, False, TokenizerFacts(known=True, problem="loses text"), "history", "TokenizerUnusable", "loses text"),
    ],
)
def test_an_endpoint_is_routed_by_events_if_nothing_is_missing(
    publishes: bool, keys_missing: bool, tokenizer: TokenizerFacts, way: str, reason: str, said: str
) -> None:
    found = way_of(publishes=publishes, keys_missing=keys_missing, tokenizer=tokenizer)
    assert (found.way, found.reason) == (way, reason)
    assert said in found.message


def test_a_pool_has_the_worst_routing_mode_of_its_endpoints() -> None:
    ways, none = RoutingWays(), Routing(Way.HISTORY, "NoEvents", "none")
    ways.set("a", "p", Routing(Way.EVENTS))
    ways.set("b", "p", none)
    ways.set("c", "p", Routing(Way.EVENTS))
    ways.set("d", "q", none)
    assert ways.pools() == {"p": none._replace(message="1 of 3 endpoints: none"), "q": none}
    assert ways.counts() == {("p", "events", ""): 2, ("p", "history", "NoEvents"): 1, ("q", "history", "NoEvents"): 1}
    unusable = Routing(Way.HISTORY, "TokenizerUnusable", "it drops text")
    for name in ("e", "f"):
        ways.set(name, "p", unusable)
    assert ways.pools()["p"].reason == "TokenizerUnusable", "more have it"
    ways.remove("b")
    ways.remove("nobody")
    assert ways.pools()["p"] == unusable._replace(message="2 of 4 endpoints: it drops text")
    ways.remove("e")
    ways.remove("f")
    assert ways.pools()["p"] == Routing(Way.EVENTS)


def test_a_change_is_logged_once_and_an_improvement_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    ways = RoutingWays()

    def told() -> list[tuple[str, str]]:
        caplog.clear()
        ways.tell()
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    with caplog.at_level("INFO", "treeline_epp.requests.routing_ways"):
        assert told() == []
        ways.set("a", "p", Routing(Way.HISTORY, "NoTokenizer", "give one"))
        assert told() == [("WARNING", "pool p is routed by history: NoTokenizer: give one")]
        ways.set("b", "p", Routing(Way.HISTORY, "NoTokenizer", "give one"))
        assert told() == [], "the pool's is the same"
        for name in "ab":
            ways.set(name, "p", Routing(Way.EVENTS))
        assert told() == [("INFO", "pool p is routed by events")]
        ways.set("a", "p", Routing(Way.EVENTS))
        assert told() == []
