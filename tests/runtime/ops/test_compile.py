"""Every kernel compiles for the GPUs that we serve on, which takes no GPU: no spilled registers, not too much memory.

The launches are those that the host code makes for the shapes of real models: they are recorded, and not run.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from treeline_runtime.attention import Layout
from treeline_runtime.core import Context
from treeline_runtime.kvcache import KVPool
from treeline_runtime.ops import Heads
from treeline_runtime.sampling.noise import row_keys

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.nvidia")
targets = pytest.importorskip("triton.backends.compiler")

pytestmark = pytest.mark.integration

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Of a thread block, by compute capability: A100, L4 and L40, H100."""
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint32: "u32",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Of a model: its heads, and the sizes between which its projections go."""

    query: int
    kv: int
    dim: int
    hidden: int
    inner: int
    vocab: int
    normed: bool


SHAPES = {
    "llama8b": Shape(32, 8, 128, 4096, 14336, 128256, False),
    "qwen3_0_6b": Shape(16, 8, 128, 1024, 3072, 151936, True),
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: Any
    args: dict[str, Any]
    options: dict[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for what Triton compiles once."""
        types = tuple(str(value.dtype) if isinstance(value, torch.Tensor) else value for value in self.args.values())
        return self.kernel.__name__, types, tuple(self.options.items())

    def compile(self, capability: int) -> Any:
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.args[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{DTYPES[value.dtype]}"
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[i,] = [["tt.divisibility", 16]]
        source = compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=targets.GPUTarget("cuda", capability, 32), options=self.options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched in the test, instead of being run."""
    found: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        del options["warmup"]
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        found.append(Launch(kernel, given, options))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", record)
    return found


def noise(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def operations(shape: Shape) -> None:
    """Whatever a step launches but attention."""
    from treeline_runtime.ops.triton_ops import TritonOps

    ops = TritonOps()
    for outputs, inputs in ((shape.hidden, shape.query * shape.dim), (2 * shape.inner, shape.hidden)):
        ops.linear(noise(1, inputs), torch.empty(outputs, inputs, dtype=torch.bfloat16), None)
    ops.norm(noise(2, shape.hidden), noise(shape.hidden), 1e-5)
    ops.add_norm(noise(2, shape.hidden), noise(2, shape.hidden), noise(shape.hidden), 1e-5)
    ops.gate(noise(2, 2 * shape.inner))
    storing(shape, a_pool(shape))
    keys = torch.from_numpy(row_keys(range(2), range(2)))
    ops.choose(noise(2, shape.vocab), torch.zeros(2), keys)


def storing(shape: Shape, pool: KVPool) -> None:
    """Of keys and values."""
    from treeline_runtime.ops.triton_ops import TritonOps

    heads = Heads(
        shape.query, shape.kv, shape.dim, noise(shape.query + shape.kv, shape.dim) if shape.normed else None, 1e-6
    )
    angles = noise(2, 1, shape.dim)
    context = Context(
        SimpleNamespace(pool=pool),  # type: ignore[arg-type]
        None,
        torch.zeros(2, dtype=torch.int64),
        angles,
        angles,
        torch.zeros(2, dtype=torch.int32),
    )
    TritonOps().rotate_and_store(noise(2, (shape.query + 2 * shape.kv) * shape.dim), heads, 0, context)


def products_of_fp8(shape: Shape) -> None:
    """Of few tokens and many, with a scale for a row and for each block of it."""
    from treeline_runtime.ops.fp8 import scaled_linear

    outputs, inputs = 2 * shape.inner, shape.hidden
    values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    for tokens in (2, 200):
        for group in (inputs, 128):
            scaled_linear(noise(tokens, inputs), values, torch.empty(inputs // group, outputs), group, None, None)
    scaled_linear(noise(2, inputs), values, torch.empty(1, outputs), inputs, 0.1, noise(outputs))


def cache_of_fp8(shape: Shape) -> None:
    pool = a_pool(shape, torch.float8_e4m3fn)
    storing(shape, pool)
    attention(shape, pool)


def attention(shape: Shape, pool: KVPool | None = None) -> None:
    """Decode, and prompts with their keys split and not."""
    from treeline_runtime.attention.decode import Decode
    from treeline_runtime.attention.extend import Extend

    prompts = Extend(pool or a_pool(shape), shape.query, shape.kv, shape.dim)
    backend = Decode(prompts)
    table, rows = torch.zeros(2, 64, dtype=torch.int64), torch.arange(2)
    for q_len, programs in ((1, 1), (100, 1), (100, 1000)):
        prompts._programs, prompts._partial = programs, torch.empty(4000, 1)
        q = noise(2 * q_len, shape.query, shape.dim)
        backend.forward(0, q, q, q, backend.plan(Layout([q_len] * 2, [1000] * 2, table, rows)))


def a_pool(shape: Shape, stored: torch.dtype | None = None) -> KVPool:
    return KVPool(
        num_layers=1,
        num_pages=1,
        page_size=16,
        num_kv_heads=shape.kv,
        head_dim=shape.dim,
        dtype=torch.bfloat16,
        device=CPU,
        stored=stored,
    )


CAPABILITIES = {operations: (90,), attention: (80, 90), products_of_fp8: (89, 90), cache_of_fp8: (90,)}
"""What is launched, and what it is compiled for."""
CASES = [(what, name) for what in (operations, attention) for name in SHAPES]
CASES += [(products_of_fp8, "llama8b"), (cache_of_fp8, "llama8b")]


@pytest.mark.parametrize(("what", "shape"), CASES)
def test_the_kernels_compile(what: Any, shape: str, launches: list[Launch], tmp_path: Path) -> None:
    what(SHAPES[shape])
    different = {launch.key: launch for launch in launches}.values()
    assert len(different) > 4
    for launch in different:
        for capability in CAPABILITIES[what]:
            made = launch.compile(capability)
            where = f"{launch.kernel.__name__} for {capability}"
            assert made.metadata.shared <= SHARED_BYTES[capability], where
            assert stack_bytes(made.asm["cubin"], tmp_path / "kernel") <= 64, f"{where} spills registers"
            if launch.kernel.__name__ == "extend" and capability == 90:
                assert "wgmma.mma_async" in made.asm["ptx"], "it does not use Hopper's matrix units"


def stack_bytes(cubin: bytes, path: Path) -> int:
    """What a thread keeps in local memory, as the compiler's own tool says it. `path`: for the tool to read."""
    path.write_bytes(cubin)
    tool = Path(backends.__file__).parent / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found, said
    return int(found.group(1))
