import socket
from pathlib import Path

import pytest
from treeline.up.plan import UpOptions, busy_ports, gateway_url, plan


def children(**options):
    return plan(UpOptions(model="some/model", **options), Path("/bin/envoy"), Path("/tmp/envoy.json"))


def test_one_picker_and_one_envoy_stand_before_the_runtimes_asked_for():
    assert [child.name for child in children(replicas=3)] == [
        "runtime-0",
        "runtime-1",
        "runtime-2",
        "picker",
        "envoy",
    ]


def test_no_two_processes_share_a_port():
    bound = [address for child in children(replicas=8) for address in child.ports.values()]
    assert len(bound) == len(set(bound)) == 8 * 4 + 3 + 2


def test_the_picker_is_told_every_runtime():
    *runtimes, picker, _ = children(replicas=2)
    for runtime in runtimes:
        host, port = runtime.ports["port"]
        assert f"{runtime.name}={host}:{port}" in picker.argv


def test_arguments_for_the_runtimes_reach_every_runtime_and_nobody_else():
    *runtimes, picker, envoy = children(runtime_args=("--max-total-tokens", "4096"))
    assert all(runtime.argv[-2:] == ("--max-total-tokens", "4096") for runtime in runtimes)
    assert "--max-total-tokens" not in (*picker.argv, *envoy.argv)


def test_envoy_waits_for_the_picker_so_that_its_first_request_is_picked():
    assert children()[-1].after == ("picker",)


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:8080"), ("0.0.0.0", "http://127.0.0.1:8080")]
)
def test_the_gateway_is_reached_by_an_address_one_can_connect_to(host, url):
    assert gateway_url(UpOptions(model="m", host=host)) == url


def test_a_busy_port_is_named_with_its_use_and_a_free_one_is_not():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        lines = busy_ports(children(replicas=1, port=taken)[-1:])
        assert [line for line in lines if f"port {taken}" in line and "gateway" in line]
    assert not [line for line in busy_ports(children(replicas=1, port=taken)[-1:]) if f"port {taken}" in line]
