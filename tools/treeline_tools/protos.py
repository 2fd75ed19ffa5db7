"""The Python modules of our protobuf files, made by protobuf's own compiler."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import grpc_tools
from grpc_tools import protoc

FILES: Final = (
    (Path("wire/src"), "treeline_wire/envoy.proto"),
    (Path("runtime/src"), "treeline_runtime/grpc/inference.proto"),
    (Path("runtime/src"), "treeline_runtime/grpc/scheduler.proto"),
)
"""Folders of distributions, and files in them."""


def modules(root: Path) -> dict[Path, str]:
    """Path in the checkout → text: the messages, and their types for mypy."""
    google = Path(grpc_tools.__file__).with_name("_proto")
    found = dict[Path, str]()
    for folder, file in FILES:
        with TemporaryDirectory() as made:
            written = [f"--python_out={made}", f"--pyi_out={made}"]
            if protoc.main(["protoc", f"-I{root / folder}", f"-I{google}", *written, file]):
                raise SystemExit(f"{file}: protoc refuses it; its message is above")
            found |= {folder / path.relative_to(made): path.read_text() for path in Path(made).rglob("*_pb2.*")}
    return found
