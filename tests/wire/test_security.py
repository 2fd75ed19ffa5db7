"""Key files, the loopback rule, and real sockets."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import zmq
from treeline_wire.security import CurveKeys, KeyFileError, is_loopback

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


@pytest.fixture
def keys(tmp_path: Path) -> CurveKeys:
    return CurveKeys.generate(tmp_path / "keys")


@pytest.fixture
def context() -> Iterator[Context]:
    """A context whose sockets drop unsent messages."""
    context: Context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    yield context
    context.destroy()


def test_a_pair_is_written_for_the_owner_only_and_read_back(keys: CurveKeys, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert CurveKeys.load(folder) == keys
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"public.key": 0o600, "secret.key": 0o600}


def test_existing_keys_are_never_replaced(keys: CurveKeys, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot write"):
        CurveKeys.generate(tmp_path / "keys")
    assert CurveKeys.load(tmp_path / "keys") == keys


def test_a_mounted_secret_may_be_group_readable_and_linked(keys: CurveKeys, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    for name in ("public.key", "secret.key"):
        os.chmod(tmp_path / "keys" / name, 0o440)
        (mount / name).symlink_to(tmp_path / "keys" / name)
    assert CurveKeys.load(mount) == keys


def test_bad_key_files_are_one_typed_error(keys: CurveKeys, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    with pytest.raises(KeyFileError, match="cannot read"):
        CurveKeys.load(tmp_path)
    os.chmod(folder / "secret.key", 0o604)
    with pytest.raises(KeyFileError, match="open to everyone"):
        CurveKeys.load(folder)
    os.chmod(folder / "secret.key", 0o600)
    other = CurveKeys.generate(tmp_path / "other")
    (folder / "public.key").write_bytes(other.public)
    with pytest.raises(KeyFileError, match="does not belong"):
        CurveKeys.load(folder)
    for text in (b"", b"short", b"\xff" * 40, b"~" * 40):
        (folder / "secret.key").write_bytes(text)
        with pytest.raises(KeyFileError, match="is not a key"):
            CurveKeys.load(folder)


def test_the_secret_is_not_printed(keys: CurveKeys) -> None:
    assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"])
def test_loopback_addresses_are_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "::", "10.0.0.1", "example.org", "", "127.0.0.1.example.org", "::ffff:10.0.0.1"]
)
def test_network_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def receive(socket: Socket, timeout_ms: int) -> list[bytes] | None:
    return socket.recv_multipart() if socket.poll(timeout_ms) else None


def subscriber(context: Context, port: int, keys: CurveKeys | None) -> Socket:
    socket = context.socket(zmq.SUB)
    if keys is not None:
        keys.secure_client(socket)
    socket.subscribe(b"")
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def test_a_subscriber_without_the_keys_hears_nothing(context: Context, keys: CurveKeys, tmp_path: Path) -> None:
    server = context.socket(zmq.XPUB)
    keys.secure_server(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    stranger = subscriber(context, port, None)
    impostor = subscriber(context, port, CurveKeys.generate(tmp_path / "impostor"))
    friend = subscriber(context, port, CurveKeys.load(tmp_path / "keys"))
    assert receive(server, 60_000) == [b"\x01"], "the friend's subscription has arrived"
    for number in range(20):
        server.send_multipart([b"", bytes([number]), b"every user's prompt"])
    heard = [receive(friend, 60_000) for _ in range(20)]
    assert [message[1] for message in heard if message] == [bytes([n]) for n in range(20)]
    assert receive(server, 0) is None, "no other peer has subscribed"
    assert receive(stranger, 300) is None
    assert receive(impostor, 0) is None


def ask(socket: Socket) -> None:
    """Send a request, unless the peer has refused this socket already: sending would then wait forever."""
    with contextlib.suppress(zmq.Again):
        socket.send_multipart([b"", b"treeline", b"snapshot", b"1"], zmq.NOBLOCK)


def test_a_dealer_without_the_keys_gets_no_answer(context: Context, keys: CurveKeys) -> None:
    server = context.socket(zmq.ROUTER)
    keys.secure_server(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    stranger, friend = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    keys.secure_client(friend)
    for socket in (stranger, friend):
        socket.connect(f"tcp://127.0.0.1:{port}")
        ask(socket)
    request = receive(server, 60_000)
    assert request is not None
    server.send_multipart([request[0], b"", b"yes"])
    assert receive(friend, 60_000) == [b"", b"yes"]
    assert receive(server, 300) is None, "the stranger's request never arrives"
    assert receive(stranger, 0) is None


def test_a_client_with_keys_hears_nothing_from_a_server_without(context: Context, keys: CurveKeys) -> None:
    server = context.socket(zmq.XPUB)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client = subscriber(context, port, keys)
    assert receive(server, 300) is None
    server.send(b"forged")
    assert receive(client, 0) is None
