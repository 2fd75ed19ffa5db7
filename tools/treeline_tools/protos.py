"""The Python modules of `wire/src/treeline_wire/envoy.proto`, made by protobuf's own compiler."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import grpc_tools
from grpc_tools import protoc

WIRE: Final = Path("wire/src")


def modules(root: Path) -> dict[Path, str]:
    """Path in the checkout → text: the messages, and their types for mypy."""
    google = Path(grpc_tools.__file__).with_name("_proto")
    with TemporaryDirectory() as made:
        written = [f"--python_out={made}", f"--pyi_out={made}"]
        status = protoc.main(["protoc", f"-I{root / WIRE}", f"-I{google}", *written, "treeline_wire/envoy.proto"])
        if status:
            raise SystemExit("envoy.proto: protoc refuses it; its message is above")
        return {WIRE / path.relative_to(made): path.read_text() for path in Path(made).rglob("envoy_pb2.*")}
