"""Only holders of the key make and read datagrams."""

from treeline_epp.peers.seal import OVERHEAD_BYTES, Seal, peer_key
from treeline_wire.peers import MOST_BYTES

ONE, OTHER = peer_key(b"one"), peer_key(b"other")


def test_a_holder_of_the_key_reads_a_datagram() -> None:
    sender = Seal(ONE)
    for size in (0, 1, 40, MOST_BYTES):
        message = bytes(range(256)) * 5
        datagram = sender.close(message[:size])
        assert Seal(ONE).open(datagram) == (sender.sender, message[:size])
        assert len(datagram) - size <= OVERHEAD_BYTES
        assert message[:size] not in datagram or size < 8, "and the datagram does not show it"


def test_no_two_datagrams_are_equal() -> None:
    seal = Seal(ONE)
    assert len({seal.close(b"the same") for _ in range(300)}) == 300


def test_any_other_datagram_is_rejected() -> None:
    datagram = Seal(ONE).close(b"something that is said")
    seal = Seal(ONE)
    assert seal.open(datagram) is not None
    assert Seal(OTHER).open(datagram) is None
    for at in range(len(datagram)):
        assert seal.open(datagram[:at]) is None
        assert seal.open(datagram[:at] + bytes((datagram[at] ^ 0x20,)) + datagram[at + 1 :]) is None
    assert seal.open(datagram + b"\0") is None
    assert seal.open(datagram[:7] + b"\xff" * 100) is None
    assert seal.open(datagram[:1] * 5000) is None


def test_the_datagram_key_differs_from_the_secret() -> None:
    assert len(ONE) == 32
    assert len({ONE, OTHER, peer_key(b"")}) == 3
