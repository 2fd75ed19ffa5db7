"""Publishers' state machines against a simulated engine behind a bad link."""

import pytest
from support.epp_core import Lab
from treeline_epp.publisher import State


def live(lab: Lab) -> None:
    lab.connect()
    lab.advance(0.5)
    assert lab.publisher.state is State.LIVE


@pytest.mark.parametrize("seed", range(100))
def test_whatever_is_lost_the_index_equals_the_cache_within_two_seconds_of_the_last_event(seed: int) -> None:
    lab = Lab(seed, loss=0.02 if seed % 2 else 0.2, slow=0.05 if seed % 3 == 0 else 0.0)
    rng = lab.rng
    if rng.random() < 0.7:
        for _ in range(rng.randrange(30)):
            lab.publish()  # a late join
    lab.connect()
    for _ in range(60):
        roll = rng.random()
        if roll < 0.7:
            lab.publish()
        elif roll < 0.8:
            lab.heartbeat()
        elif roll < 0.83 and lab.connected:
            lab.disconnect()
        elif roll < 0.85:
            if lab.connected:
                lab.disconnect()
            lab.engine.restart()
        elif not lab.connected:
            lab.connect()
        lab.advance(rng.random() * 0.3)
    if not lab.connected:
        lab.connect()
    lab.publish()
    lab.slow = 0.0
    lab.advance(2.0 if seed % 3 else 8.0)  # an answer that never comes costs a timeout and a pause
    lab.assert_converged()
    assert lab.publisher.state is State.LIVE
