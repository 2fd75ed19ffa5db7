"""Every kernel compiles for the GPUs that we serve on, which takes no GPU: no spilled registers, not too much memory.

The launches are those that the host code makes for the shapes of real models: they are recorded, and not run.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from treeline_runtime.attention import Layout
from treeline_runtime.context import Context
from treeline_runtime.kvcache import KVPool
from treeline_runtime.models.model_config import PLAIN, ClampedGate, Scoring
from treeline_runtime.ops import Experts, Heads, Tables
from treeline_runtime.ops.base import Meeting
from treeline_runtime.sampling import mask_words
from treeline_runtime.sampling.noise import row_keys
from treeline_runtime.scheduler.forward import DecodeInputs

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.nvidia")
targets = pytest.importorskip("triton.backends.compiler")

pytestmark = [pytest.mark.integration, pytest.mark.deep]

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of a thread block, by compute capability: A100, L4 and L40, H100."""
REGISTERS = 64 << 10
"""All registers of a multiprocessor."""
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
    """A model's shape: its heads, and the sizes of its projections."""

    query: int
    kv: int
    dim: int
    hidden: int
    inner: int
    vocab: int
    normed: bool
    rotary: int = 128
    scoring: Scoring = PLAIN
    plus_one: bool = False

    @property
    def norms(self) -> torch.dtype:
        return torch.float32 if self.plus_one else torch.bfloat16


SHAPES = {
    "llama8b": Shape(32, 8, 128, 4096, 14336, 128256, False),
    "qwen3_0_6b": Shape(16, 8, 128, 1024, 3072, 151936, True),
    "phi4_mini": Shape(24, 8, 128, 3072, 8192, 200064, False, rotary=96),
    "gemma": Shape(8, 4, 256, 2304, 9216, 256000, True, 256, Scoring(256**-0.5, 50.0, (4096,)), plus_one=True),
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: Any
    args: dict[str, Any]
    options: dict[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for launches that Triton compiles once."""
        types = tuple(str(value.dtype) if isinstance(value, torch.Tensor) else value for value in self.args.values())
        return self.kernel.__name__, types, tuple(self.options.items())

    @property
    def variant(self) -> tuple[Any, ...]:
        """Return what Triton specialises on in variable arguments: whether they are 1, or multiples of 16."""
        found: list[Any] = []
        for parameter in self.kernel.params:
            value = self.args[parameter.name]
            if isinstance(value, torch.Tensor):
                found.append(parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0)
            elif isinstance(value, int) and not (parameter.is_constexpr or parameter.do_not_specialize):
                found.append((value == 1, value % 16 == 0))
        return tuple(found)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The kernel with its constants."""
        constants = tuple(self.args[parameter.name] for parameter in self.kernel.params if parameter.is_constexpr)
        return self.kernel.__name__, constants, tuple(self.options.items())

    def compile(self, capability: int) -> Any:
        signature, constants, attributes, options = {}, {}, {}, dict(self.options)
        if capability < 90 and options.pop("launch_pdl", False):
            return dataclasses.replace(self, args=self.args | {"EARLY": False}, options=options).compile(capability)
        for i, parameter in enumerate(self.kernel.params):
            value = self.args[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{DTYPES[value.dtype]}"
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            is_aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if is_aligned and not parameter.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
        source = compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=targets.GPUTarget("cuda", capability, 32), options=self.options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record launches instead of running them."""
    found: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        del options["warmup"]
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        found.append(Launch(kernel, given, options))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", record)
    early = {"EARLY": True, "launch_pdl": True}
    for module in ("ops.triton_ops", "ops.rank_kernels", "ops.adapter_kernels", "attention.decode"):
        monkeypatch.setattr(f"treeline_runtime.{module}.early_launch", lambda _: early)
    return found


def noise(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def operations(shape: Shape) -> None:
    """Launch every operation of a step except attention."""
    from treeline_runtime.ops import adapter_kernels, rank_kernels
    from treeline_runtime.ops.triton_ops import TritonOps

    ops = TritonOps()
    cells, angles = torch.zeros(2, 2, dtype=torch.int32), noise(2, 64, shape.rotary)
    table = torch.zeros(4, 64, dtype=torch.int64)
    for deltas in (None, table[0]):
        ops.look_up(cells[0], cells[1], Tables(table, table, 16, angles, angles, deltas))
    ops.put(table[0, :2], table[:, 1:], cells[0], cells[1])
    for outputs, inputs in ((shape.hidden, shape.query * shape.dim), (2 * shape.inner, shape.hidden)):
        ops.linear(noise(1, inputs), torch.empty(outputs, inputs, dtype=torch.bfloat16), None)
    weight = noise(shape.hidden).to(shape.norms)
    ops.norm(noise(2, shape.hidden), weight, 1e-5)
    ops.add_norm(noise(2, shape.hidden), noise(2, shape.hidden), weight, 1e-5, weight if shape.plus_one else None)
    meeting = Meeting(1, torch.zeros(4, dtype=torch.int64), 1 << 20)
    rank_kernels.add_norm(meeting, 0, noise(2, shape.hidden), weight, 1e-5, weight if shape.plus_one else None)
    for widths, inputs in (
        ((shape.query * shape.dim, shape.kv * shape.dim, shape.kv * shape.dim), shape.hidden),
        ((shape.inner, shape.inner), shape.hidden),
        ((shape.hidden,), shape.inner),
    ):
        a, b = noise(2, 16, len(widths), inputs), noise(2, 16, sum(widths))
        slots = torch.zeros(2, dtype=torch.int32)
        adapter_kernels.add_low_rank(noise(2, inputs), noise(2, sum(widths)), a, b, widths, slots, slots)
    ops.gate(noise(2, 2 * shape.inner), "gelu_tanh" if shape.plus_one else "silu")
    ops.softcap(noise(2, shape.vocab), 30.0)
    storing(shape, a_pool(shape))
    keys = torch.from_numpy(row_keys(range(2), range(2)))
    ops.choose(noise(2, shape.vocab), torch.zeros(2), keys)
    ops.forbid(torch.zeros(2, shape.vocab), torch.zeros(2, mask_words(shape.vocab), dtype=torch.int32))


def storing(shape: Shape, pool: KVPool) -> None:
    """Launch the storing of keys and values."""
    from treeline_runtime.ops.triton_ops import TritonOps

    norm = noise(shape.query + shape.kv, shape.dim).to(shape.norms) if shape.normed else None
    heads = Heads(shape.query, shape.kv, shape.dim, norm, 1e-6)
    angles = noise(1, 2, 1, shape.rotary)
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
    """Launch products of few tokens and of many, with a scale for each row and for each block of a row."""
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


STEPS = ((1, 1), (100, 1), (100, 1000))
"""(new tokens, programs that run at once): decode, and prompts with their keys split and not"""


def attention(shape: Shape, pool: KVPool | None = None, steps: tuple[tuple[int, int], ...] = STEPS) -> None:
    from treeline_runtime.attention.decode import Decode
    from treeline_runtime.attention.extend import Extend

    prompts = Extend(pool or a_pool(shape), shape.query, shape.scoring)
    backend = Decode(prompts)
    table, rows = torch.zeros(2, 64, dtype=torch.int64), torch.arange(2)
    for q_len, programs in steps:
        prompts._programs, prompts._partial = programs, torch.empty(4000, 1)
        q = noise(2 * q_len, shape.query, shape.dim)
        backend.forward(0, q, q, q, backend.plan(Layout([q_len] * 2, [5000] * 2, table, rows)))


def prompts_of_float32(shape: Shape) -> None:
    """Launch prompts in float32, which no tensor core multiplies: only registers limit them."""
    from treeline_runtime.attention.extend import Extend

    for dim in (128, 256):
        pool = a_pool(dataclasses.replace(shape, dim=dim), dtype=torch.float32)
        prompts, q = Extend(pool, shape.query), torch.zeros(200, shape.query, dim)
        for programs in (1, 1000):
            prompts._programs, prompts._partial = programs, torch.empty(4000, 1)
            layout = Layout([100] * 2, [5000] * 2, torch.zeros(2, 64, dtype=torch.int64), torch.arange(2))
            prompts.forward(0, q, q, q, prompts.plan(layout))


def experts(shape: Shape) -> None:
    """Launch the experts of gpt-oss-20b, a superset of other models': every tile, tokens sorted and not."""
    from treeline_runtime.ops.triton_ops import TritonOps

    ops, count, hidden, inner = TritonOps(), 32, 2880, 2880
    gate_up = torch.empty(count, 2 * inner, hidden, dtype=torch.bfloat16)
    biases = noise(count, 2 * inner), noise(count, hidden)
    weights = Experts(gate_up, gate_up[:, :hidden], biases, ClampedGate(1.702, 7.0))
    scores, ids = ops.route(noise(1, count), 4, normalise=True)
    ops.experts(noise(1, hidden), weights, scores, ids)


def a_pool(shape: Shape, stored: torch.dtype | None = None, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    return KVPool(
        num_layers=1,
        num_pages=1,
        page_size=16,
        num_kv_heads=shape.kv,
        head_dim=shape.dim,
        dtype=dtype,
        device=CPU,
        stored=stored,
    )


CAPABILITIES = {
    operations: (90,),
    attention: (80, 90),
    products_of_fp8: (89, 90),
    cache_of_fp8: (90,),
    experts: (90,),
    prompts_of_float32: (90,),
}
"""Launches, and the capabilities that they are compiled for."""
CASES = [
    (what, name) for what in (operations, attention) for name in SHAPES if (what, name) != (attention, "phi4_mini")
]
CASES += [(products_of_fp8, "llama8b"), (cache_of_fp8, "llama8b"), (cache_of_fp8, "gemma"), (experts, "llama8b")]
CASES += [(prompts_of_float32, "llama8b")]


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
            registers, stack_bytes = resources(made.asm["cubin"], tmp_path / "kernel")
            assert stack_bytes <= 64, f"{where} spills registers"
            if launch.kernel.__name__ == "decode_shares":
                at_once = 2 if launch.args["DIM"] > 128 else 3  # its shares are counted on running all at once
                assert at_once * 32 * launch.options["num_warps"] * registers <= REGISTERS, where
            if launch.kernel.__name__ == "extend" and capability == 90 and what is not prompts_of_float32:
                assert "wgmma.mma_async" in made.asm["ptx"], "it does not use Hopper's matrix units"


def test_steps_of_all_sizes_share_their_kernels(launches: list[Launch]) -> None:
    """Otherwise the first step with one request, or with sixteen, would make all others wait for the compiler."""
    from treeline_runtime.attention.decode import Decode
    from treeline_runtime.attention.extend import Extend
    from treeline_runtime.ops.fp8 import scaled_linear
    from treeline_runtime.ops.triton_ops import TritonOps

    shape = SHAPES["llama8b"]
    prompts = Extend(a_pool(shape), shape.query)
    prompts._partial = torch.empty(100_000, 1)
    backend, ops = Decode(prompts), TritonOps()
    values = torch.empty(shape.hidden, shape.hidden, dtype=torch.float8_e4m3fn)
    table = torch.zeros(64, 64, dtype=torch.int64)
    for sequences in (1, 2, 3, 16):
        for q_len, programs in ((1, 1), (9, 1), (9, 1000), (9, 100_000)):
            prompts._programs = programs
            q = noise(sequences * q_len, shape.query, shape.dim)
            layout = Layout([q_len] * sequences, [5000] * sequences, table, torch.arange(sequences))
            backend.forward(0, q, q, q, backend.plan(layout))
        for group in (shape.hidden, 128):
            scales = torch.empty(shape.hidden // group, shape.hidden)
            scaled_linear(noise(sequences, shape.hidden), values, scales, group, None, None)
        keys = np.zeros((sequences, 2), dtype=np.int32)
        inputs = DecodeInputs([0] * sequences, [0] * sequences, [0] * sequences, [1.0] * sequences, keys).on(CPU)
        ops.choose(noise(sequences, shape.vocab), inputs.temperatures, inputs.keys)
        angles = noise(2, 64, shape.rotary)
        found = ops.look_up(inputs.rows, inputs.positions, Tables(table, table, 16, angles, angles))
        ops.put(found.ids, table[:, 1:], inputs.rows, inputs.positions)
        masks = torch.zeros(sequences, mask_words(shape.vocab), dtype=torch.int32)
        ops.forbid(torch.zeros(sequences, shape.vocab), masks)
    variants: dict[Any, set[Any]] = {}
    for launch in launches:
        variants.setdefault(launch.kind, set()).add(launch.variant)
    assert len(variants) >= 10
    assert [kind for kind, found in variants.items() if len(found) > 1] == []


def resources(cubin: bytes, path: Path) -> tuple[int, int]:
    """Return a thread's registers and bytes of local memory, as the compiler's own tool reports them. `path`: for the
    tool to read."""
    path.write_bytes(cubin)
    tool = Path(backends.__file__).parent / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found.group(1)), int(found.group(2))
