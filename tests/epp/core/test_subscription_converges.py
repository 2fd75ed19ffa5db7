"""Subscriptions to KV events under all faults at once: the index converges to the engine's cache."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.epp_core import Lab


@pytest.mark.parametrize("seed", range(100))
def test_the_index_equals_the_cache_within_two_seconds_of_the_last_event_after_any_loss(seed: int) -> None:
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
    assert lab.subscription.live


class SubscriptionMachine(RuleBasedStateMachine):
    """Any order of events and faults; left alone, the index converges to the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.lab = Lab(0, loss=0.1)

    @rule(count=st.integers(1, 12))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.lab.publish()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.lab.advance(seconds)

    @precondition(lambda self: not self.lab.connected)
    @rule()
    def connect(self) -> None:
        self.lab.connect()

    @precondition(lambda self: self.lab.connected)
    @rule()
    def disconnect(self) -> None:
        self.lab.disconnect()

    @rule()
    def restart(self) -> None:
        if self.lab.connected:
            self.lab.disconnect()
        self.lab.engine.restart()

    @rule(slow=st.sampled_from([0.0, 0.3]), loss=st.sampled_from([0.0, 0.02, 0.5]))
    def slow(self, slow: float, loss: float) -> None:
        self.lab.slow, self.lab.loss = slow, loss

    @rule()
    def rebuild(self) -> None:
        self.lab.index.request_rebuild(self.lab.pod)

    @precondition(lambda self: self.lab.connected and self.lab.engine.ring)
    @rule()
    def twice(self) -> None:
        self.lab.again()

    @invariant()
    def consistent(self) -> None:
        self.lab.index.check()

    @rule()
    def assert_converged(self) -> None:
        lab = self.lab
        lab.slow = 0.0
        if not lab.connected:
            lab.connect()
        lab.advance(25.0)
        lab.assert_converged()
        assert lab.subscription.live


TestSubscriptionMachine = SubscriptionMachine.TestCase
TestSubscriptionMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
