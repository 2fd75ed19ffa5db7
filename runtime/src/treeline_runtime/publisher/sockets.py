"""The publisher's addresses: which keys and host, and whether the ports are free. Checked before the model loads."""

from __future__ import annotations

import socket

from treeline_wire.security import CurveKeys, InsecureBindError, KeyFileError, bind_host

from treeline_runtime.args import ServerArgs


class EventsError(Exception):
    """The event sockets cannot be opened as asked; the message says what to change."""


def open_keys(args: ServerArgs) -> tuple[CurveKeys | None, str]:
    """The key pair, if any, and the address to bind. Raises EventsError."""
    try:
        keys = None if args.curve_dir is None else CurveKeys.load(args.curve_dir)
        host = args.events_host or ("0.0.0.0" if keys else "127.0.0.1")
        bind_host(keys, host)
        return keys, str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except KeyFileError as error:
        raise EventsError(f"--curve-dir: {error}") from None
    except InsecureBindError as error:
        raise EventsError(f"--events-host: {error} (--curve-dir)") from None
    except socket.gaierror as error:
        raise EventsError(f"--events-host: {args.events_host!r} is no address: {error.strerror}") from None


def check_event_ports(args: ServerArgs, host: str) -> None:
    """Raises EventsError naming the port that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for flag, port in (
        ("--events-port", args.events_port),
        ("--replay-port", args.replay_port),
        ("--load-port", args.load_port),
    ):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise EventsError(
                    f"{flag}: cannot bind {host}:{port}: {error.strerror} (0 = any free port; --no-events = none)"
                ) from None
