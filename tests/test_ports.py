import socket

import pytest
from support.ports import Ports, free_base, free_ports, outside, slice_of


def test_ports_lie_outside_the_range_of_outgoing_connections():
    assert outside(32_768, 60_999) == range(10_000, 20_000)
    assert outside(15_000, 60_999) == range(10_000, 15_000)
    assert outside(10_000, 60_999) == range(61_000, 65_536)
    assert outside(1024, 50_000) == range(50_001, 65_536)


def test_workers_share_no_port_and_leave_none():
    slices = [slice_of(range(10_000, 20_000), worker, 4) for worker in range(4)]
    assert [port for ports in slices for port in ports] == list(range(10_000, 20_000))


def test_no_port_is_given_twice():
    first = free_base(3)
    assert len({first, first + 1, first + 2, *free_ports(5)}) == 8


def test_a_port_in_use_is_skipped():
    first = free_base(4)
    ports = Ports(range(first, first + 4), start=3)
    with socket.create_server(("127.0.0.1", first + 1)):
        assert ports.base(2) == first + 2
        assert ports.base(1) == first
        with pytest.raises(OSError, match=f"no 3 free ports in a row from {first} to {first + 3}"):
            ports.base(3)
