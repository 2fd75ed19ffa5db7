"""The server's sockets: inference, metrics, administration. They are bound before anything slow; before that the
publisher's keys, host and ports are checked.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from treeline_wire.security import CurveKeys, KeyFileError, is_loopback

from treeline_runtime.args import ServerArgs

_FIXES = {
    errno.EADDRINUSE: ": another program listens there, or another flag uses it; choose another port",
    errno.EACCES: ": ports below 1024 need root; choose a larger one",
}


class ListenError(Exception):
    """The server cannot listen as asked; the message names the flag."""


@dataclass(frozen=True)
class Listeners:
    """Listening TCP sockets; None: that listener is off."""

    http: socket.socket
    metrics: socket.socket | None
    admin: socket.socket | None


@contextlib.contextmanager
def listening(args: ServerArgs) -> Iterator[Listeners]:
    """A context manager with the sockets for `args`. Raises ListenError."""
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(listen(args.host, args.port, ""))
        if args.grpc_port is not None:  # gRPC binds it by itself, when the server runs
            listen(args.host, args.grpc_port, "grpc-").close()
        metrics = admin = None
        if args.metrics_port is not None:
            metrics = stack.enter_context(listen(args.metrics_host, args.metrics_port, "metrics-"))
        if args.admin_port is not None:
            closed = args.admin_key is None
            admin = stack.enter_context(listen(args.admin_host, args.admin_port, "admin-", closed=closed))
        yield Listeners(http, metrics, admin)


def listen(host: str, port: int, flag: str, *, closed: bool = False) -> socket.socket:
    """A listening socket for `--{flag}host` and `--{flag}port`. `closed`: loopback only.

    Raises ListenError.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):  # the latter for what cannot be a name
        raise ListenError(_no_address(flag, host)) from None
    if closed and not is_loopback(str(where[0])):
        raise ListenError(
            f"--{flag}host: refusing to serve administration on {host} without a key: whoever can connect could end "
            "everybody's requests. Give TREELINE_ADMIN_KEY in the environment, or bind to 127.0.0.1"
        )
    made = socket.socket(family, kind, proto)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(where)
        made.listen(2048)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ListenError(_no_address(flag, host)) from None
        fix = _FIXES.get(error.errno or 0, "") + (" (0 = any free port; off = none)" if flag else "")
        raise ListenError(f"--{flag}port: cannot listen on {host}:{port}: {error.strerror}{fix}") from None
    made.setblocking(False)
    return made


def _no_address(flag: str, host: str) -> str:
    return (
        f"--{flag}host: {host!r} is no address of this machine: give 127.0.0.1 (this machine alone), 0.0.0.0 (all its "
        f"networks), or one of its own addresses; the port is --{flag}port"
    )


def address(listener: socket.socket) -> tuple[str, int]:
    """Host and port of a listening socket."""
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def url(listener: socket.socket) -> str:
    """Its URL for clients on this machine."""
    return url_of(*address(listener))


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


LAST_PORT = 65535


class EventsError(Exception):
    """The event sockets cannot be opened; the message says what to change."""


def open_keys(args: ServerArgs) -> tuple[CurveKeys | None, str]:
    """The key pair, if any, and the address to bind. Raises EventsError."""
    try:
        keys = None if args.curve_dir is None else CurveKeys.load(args.curve_dir)
        host = args.host if keys else "127.0.0.1"  # without keys the network could read cached prompts
        return keys, str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except KeyFileError as error:
        raise EventsError(f"--curve-dir: {error}") from None
    except socket.gaierror as error:
        raise EventsError(f"--host: {args.host!r} is not an address: {error.strerror}") from None


def check_event_ports(args: ServerArgs, host: str) -> None:
    """Raises EventsError naming a port that is taken or given twice. Each rank has its own: ports count up by rank."""
    flags = dict[int, str]()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bases = list[tuple[str, int]]()
    if not args.no_events:
        bases += [(f"--{name}-port", getattr(args, f"{name}_port")) for name in ("events", "replay", "load")]
    if args.kv_transfer_port is not None:
        bases.append(("--kv-transfer-port", args.kv_transfer_port))
    for flag, base in bases if args.dp_size > 1 else ():
        if not 0 < base <= LAST_PORT + 1 - args.dp_size:
            raise EventsError(
                f"{flag}: {base} is not the first of {args.dp_size} ports, one for each rank (--dp-size): give one "
                f"from 1 to {LAST_PORT + 1 - args.dp_size} ({_none(flag)} = none)"
            )
    for flag, port in ((flag, base + rank) for flag, base in bases for rank in range(args.dp_size)):
        if port and (other := flags.setdefault(port, flag)) != flag:
            raise EventsError(f"{flag}: {port} is already the port of {other}: give another one (0 = any free port)")
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise EventsError(
                    f"{flag}: cannot bind {host}:{port}: {error.strerror} (0 = any free port; {_none(flag)} = none)"
                ) from None


def _none(flag: str) -> str:
    """The flag that switches off what uses this port."""
    return "--no-events" if flag != "--kv-transfer-port" else f"{flag} off"
