"""What clients use of a time that all share."""

from __future__ import annotations

from treeline_runtime.client_seconds import ClientSeconds


def test_who_has_used_too_much_waits_until_enough_is_given_back() -> None:
    now = 0.0
    seconds = ClientSeconds(30.0, 0.5, lambda: now)
    seconds.charge("a", 20.0)
    assert seconds.wait_s("a") == 0
    seconds.charge("a", 20.0)
    assert (seconds.wait_s("a"), seconds.owed("a"), seconds.wait_s("b"), seconds.wait_s(None)) == (20, 40.0, 0, 0)
    now = 19.5
    assert seconds.wait_s("a") == 1
    now = 20.0
    assert seconds.wait_s("a") == 0
    seconds.charge("a", 1.0)
    assert seconds.owed("a") == 31.0
    now = 999.0
    seconds.charge("b", 1.0)
    assert seconds._used.keys() == {"b"}, "what was given back is forgotten"
