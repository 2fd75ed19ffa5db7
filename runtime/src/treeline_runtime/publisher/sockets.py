"""The publisher's addresses: which keys and host, and whether the ports are free. Checked before the model loads."""

from __future__ import annotations

import socket

from treeline_wire.security import CurveKeys, KeyFileError

from treeline_runtime.args import ServerArgs


class EventsError(Exception):
    """The event sockets cannot be opened as asked; the message says what to change."""


def open_keys(args: ServerArgs) -> tuple[CurveKeys | None, str]:
    """The key pair, if any, and the address to bind. Raises EventsError."""
    try:
        keys = None if args.curve_dir is None else CurveKeys.load(args.curve_dir)
        host = args.host if keys else "127.0.0.1"  # without keys the network could read cached prompts
        return keys, str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except KeyFileError as error:
        raise EventsError(f"--curve-dir: {error}") from None
    except socket.gaierror as error:
        raise EventsError(f"--host: {args.host!r} is no address: {error.strerror}") from None


def check_event_ports(args: ServerArgs, host: str) -> None:
    """Raises EventsError naming the port that is taken, or given twice."""
    flags = dict[int, str]()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for flag, port in (
        ("--events-port", args.events_port),
        ("--replay-port", args.replay_port),
        ("--load-port", args.load_port),
    ):
        if port and (other := flags.setdefault(port, flag)) != flag:
            raise EventsError(f"{flag}: {port} is the port of {other}: give another one (0 = any free port)")
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise EventsError(
                    f"{flag}: cannot bind {host}:{port}: {error.strerror} (0 = any free port; --no-events = none)"
                ) from None
