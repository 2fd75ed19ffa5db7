"""Benchmarks that are scripts of a room's `benchmarks/`, run as processes that print rows as JSON.

Each script's docstring has the method. A row `floor.NAME` is the reference of `NAME`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from treeline_bench.context import ROOT, Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.processes import before_exec
from treeline_bench.results import Row

FLOOR = "floor."
VLLM_FOLDER = "TREELINE_BENCH_VLLM"
GPU_BOUNDS = {"server_over_offline": 0.95, "start.warm_s": 12.0, "overlap.idle_share": 0.03}
"""Bounds of benchmark `server`, on a GPU."""
THREADS = (1, 2)
"""Numbers of threads in benchmark `cpu`."""


@dataclass(frozen=True)
class Script:
    """A run of a script, and the metrics it must print."""

    path: str
    """Below the repository's root."""
    must: tuple[str, ...]
    args: tuple[str, ...] = ()
    prefix: str = ""
    """The prefix of its rows' names."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """References of rows, by their name without its last part."""
    others: bool = True
    """Whether further rows are reported too."""
    limit_s: float = 1800.0

    def rows(self) -> list[Row]:
        """Runs it. Raises BenchmarkError."""
        values = parse(printed(ROOT / self.path, self.args, self.limit_s), self.must, self.path)
        return [
            row(self.prefix + name, value, values.get(FLOOR + name, self.bounds.get(name.rpartition(".")[0])))
            for name, value in values.items()
            if not name.startswith(FLOOR) and (self.others or name in self.must)
        ]


Scripts = Callable[[Context], Iterator[tuple[str, Script]]]
"""A benchmark's runs, each with a description."""


def run(scripts: Scripts, context: Context) -> list[Row]:
    """The rows of all runs. Raises BenchmarkError."""
    rows: list[Row] = []
    for what, script in scripts(context):
        context.display.phase(what)
        rows += script.rows()
    return rows


def parse(printed: str, must: Sequence[str], what: str) -> dict[str, float]:
    """Values by metric from JSON: a list of rows, or one row per line. Raises BenchmarkError if one is missing."""
    try:
        if printed.lstrip().startswith("["):
            found = msgspec.json.decode(printed, type=list[_Printed])
        else:
            found = msgspec.json.Decoder(_Printed).decode_lines(printed)
    except msgspec.DecodeError as error:
        raise BenchmarkError(f"{what} printed something other than rows: {error}") from error
    values = {each.metric: each.value for each in found}
    if missing := [name for name in must if name not in values]:
        raise BenchmarkError(f"{what} did not report {', '.join(missing)}")
    return values


class _Printed(msgspec.Struct):
    metric: str
    value: float


def printed(script: Path, args: Sequence[str], limit_s: float) -> str:
    """A script's output. Raises BenchmarkError if it fails or exceeds `limit_s`."""
    if not script.exists():
        raise BenchmarkError(f"{script.name} is not here: run this in a checkout of the repository")
    process = subprocess.Popen(
        [sys.executable, str(script), *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before_exec(),
    )
    try:
        out, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{script.name} took over {limit_s:g} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise BenchmarkError(f"{script.name} exited with status {process.returncode}:\n{said[-2000:]}")
    return out


# ---- the benchmarks -----------------------------------------------------------------------------------------


def _tree(context: Context) -> Iterator[tuple[str, Script]]:
    script, few = "epp/benchmarks/tree.py", ("--sequences", "100") if context.quick else ()
    names = ("match_us.2700", "match_us.100k", "ingest_blocks_s", "remove_blocks_s", "bytes_per_block")
    yield (
        "tree: matching, ingestion, memory",
        Script(script, tuple(f"tree.{name}" for name in names), few, others=False),
    )
    if not context.quick:
        yield "tree: memory with 100 endpoints", Script(script, ("tree.rss_mb.100x30k",), ("--full",), others=False)
    if importlib.util.find_spec("dynamo") is None:
        context.display.phase("tree: not beside Dynamo's, since ai-dynamo-runtime is not installed")
    else:
        beside = Script(script, ("tree.vs_dynamo.lookup",), ("--versus-dynamo", *few), others=False)
        yield "tree: lookups beside Dynamo's", beside
    times = tuple(f"tree.event_to_routable_ms.{share}.{count}" for count in (8, 100) for share in ("p50", "p99"))
    seconds = ("--seconds", "2") if context.quick else ()
    yield (
        "tree: from an engine's publishing to the tree",
        Script("epp/benchmarks/events.py", times, seconds, others=False),
    )


def _fleet(context: Context) -> Iterator[tuple[str, Script]]:
    picked = tuple(f"picker.{figure}.{count}" for count in (1000, 5000) for figure in ("pick_ms", "pick_p99_ms"))
    few = ("--picks", "50") if context.quick else ()
    yield "fleet: choices among many endpoints", Script("epp/benchmarks/pick.py", picked, few)
    some = ("--requests", "20") if context.quick else ()
    images = Script("epp/benchmarks/images.py", ("picker.image_ms", "picker.image_turn_ms"), some)
    yield "fleet: requests with images", images
    if not context.quick:
        names = ("followed", "live_s", "events_s", "idle_cores", "files", "rss_mb")
        followed = tuple(f"picker.{name}.2000" for name in names)
        yield "fleet: 2,000 endpoints are followed", Script("epp/benchmarks/follow.py", followed)


def _scrape(context: Context) -> Iterator[tuple[str, Script]]:
    names = tuple(f"scrape.{figure}.100" for figure in ("cores", "read_us", "reads_s"))
    seconds = ("--seconds", "2" if context.quick else "15")
    yield "scrape: a hundred engines are read", Script("epp/benchmarks/scrape.py", names, seconds)


def shapes() -> tuple[str, ...]:
    """The model shapes for engine benchmarks on this machine, with random weights."""
    return ("llama8b", "qwen3_0_6b") if has_cuda() else ("tiny",)


def has_cuda() -> bool:
    """Whether torch can use a GPU; a driver alone does not tell."""
    try:
        import torch
    except ImportError:
        raise BenchmarkError("torch is not installed here") from None
    return torch.cuda.is_available()


def _engine(context: Context) -> Iterator[tuple[str, Script]]:
    for shape in shapes():
        args = ("--shape", shape, *_quick(context))
        yield f"engine: {shape}", Script("runtime/benchmarks/engine.py", (f"start.{shape}",), args, prefix="engine.")


def _server(context: Context) -> Iterator[tuple[str, Script]]:
    for shape in shapes():
        args = ("--shape", shape, *(("--quick",) if shape == "tiny" else _quick(context)))
        bounds, must = GPU_BOUNDS if has_cuda() else {}, (f"server_over_offline.{shape}",)
        yield f"server: {shape}", Script("runtime/benchmarks/server.py", must, args, bounds=bounds)


def _vllm(context: Context) -> Iterator[tuple[str, Script]]:
    folder = os.environ.get(VLLM_FOLDER)
    if folder is None and importlib.util.find_spec("vllm") is None:
        raise BenchmarkError(
            f"vLLM is not installed here; {VLLM_FOLDER} may name the folder of another Python's packages"
        )
    if not has_cuda():
        raise BenchmarkError("the comparison with vLLM needs a CUDA device")
    for shape in shapes():
        yield f"vllm: {shape}", _versus_vllm(context, shape, folder)


def _versus_vllm(context: Context, shape: str, folder: str | None, *args: str, prefix: str = "") -> Script:
    """folder: of vLLM's packages, if they are not this Python's."""
    args = ("--shape", shape, *args, *(("--vllm-path", folder) if folder else ()))
    args += ("--rounds=1",) if context.quick else ()
    return Script("runtime/benchmarks/versus_vllm.py", (f"offline.vs_vllm.{shape}",), args, prefix=prefix)


def _ranks(context: Context) -> Iterator[tuple[str, Script]]:
    shape = shapes()[0]
    args = ("--shape", shape, "--ranks", "2", *_quick(context))
    yield f"ranks: {shape}", Script("runtime/benchmarks/engine.py", (f"start.{shape}",), args, prefix="tp2.")
    folder = os.environ.get(VLLM_FOLDER)
    if folder is None and importlib.util.find_spec("vllm") is None:
        context.display.phase("ranks: not beside vLLM, which is not installed")
    else:
        yield "ranks: beside vLLM", _versus_vllm(context, shape, folder, "--ranks", "2", prefix="tp2.")


def _endurance(context: Context) -> Iterator[tuple[str, Script]]:
    large = has_cuda() and not context.quick
    args = ("--shape", "llama70b" if large else "tiny", "--ranks", "2", "--minutes", "10" if large else "0.5")
    must = ("endurance.answers", "endurance.left")
    yield "endurance: streams", Script("runtime/benchmarks/endurance.py", must, args, prefix="tp2.")


def _pairs(context: Context) -> Iterator[tuple[str, Script]]:
    must = ("pd.itl_p99_ratio", "pd.ttft_p50_ratio", "pd.transfer_gb_s")
    yield "pairs: prompts apart", Script("runtime/benchmarks/pairs.py", must, ("--shape", shapes()[0]))


def _radix(context: Context) -> Iterator[tuple[str, Script]]:
    script = Script("runtime/benchmarks/radix.py", ("radix.hit_vs_optimal",), _quick(context))
    yield "radix: share of time, hit rates", script


def _tiers(context: Context) -> Iterator[tuple[str, Script]]:
    shape, device = shapes()[0], "cuda" if has_cuda() else "cpu"
    must = (f"tiers.{device}.ttft_ratio", f"tiers.{device}.cached_share")
    yield f"tiers: {shape}", Script("runtime/benchmarks/tiers.py", must, ("--shape", shape, *_quick(context)))


def _lora(context: Context) -> Iterator[tuple[str, Script]]:
    must, shape = ("lora.base_share", "lora.throughput_share", "lora.crowded_share", "lora.load_s"), shapes()[0]
    yield f"lora: {shape}", Script("runtime/benchmarks/lora.py", must, ("--shape", shape, *_quick(context)))


def _media(context: Context) -> Iterator[tuple[str, Script]]:
    shape, path = ("qwen3vl8b" if has_cuda() else "tiny"), os.environ.get(VLLM_FOLDER)
    count = () if has_cuda() else ("--images", "200")
    vllm = ("--vllm-path", path) if path else ()
    must = ("media.paper", "media.images_s", *(("media.vs_vllm",) if path else ()))
    arguments = ("--shape", shape, *count, *vllm, *_quick(context))
    yield f"media: {shape}", Script("runtime/benchmarks/media.py", must, arguments)


def _pull(context: Context) -> Iterator[tuple[str, Script]]:
    must = ("pull.ttft_ratio", "pull.cached_share")
    yield "pull: two servers", Script("runtime/benchmarks/pull.py", must, ("--shape", shapes()[0], *_quick(context)))


def _cpu(context: Context) -> Iterator[tuple[str, Script]]:
    for threads in THREADS:
        args = ("--model", str(context.model), "--threads", str(threads), *_quick(context))
        must = tuple(f"cpu.vs_transformers.t{threads}.{name}" for name in ("b1", "b8", "mixed.b8", "prefill.4096"))
        what = f"cpu: ours and transformers in turn, {threads} threads"
        yield what, Script("runtime/benchmarks/versus_transformers.py", must, args)


def _structured(context: Context) -> Iterator[tuple[str, Script]]:
    must = ("structured.jump_forward_speedup", "structured.cached_schema_ttft_ms")
    script = Script("runtime/benchmarks/structured.py", must, _quick(context))
    yield "structured: with and without jump-forward in turn", script


def _speculation(context: Context) -> Iterator[tuple[str, Script]]:
    must = ("spec.ngram.speedup.b1", "spec.grammar.speedup.b1", "spec.simulated80.speedup.b1")
    script = Script("runtime/benchmarks/speculation.py", must, ("--shape", shapes()[0], *_quick(context)))
    yield "speculation: with and without guesses in turn", script


def _lang_client(context: Context) -> Iterator[tuple[str, Script]]:
    figures = ("vs_sglang", "cpu_ms.ours", "cpu_ms.theirs")
    must = tuple(f"lang.{figure}.{name}" for figure in figures for name in ("call", "fork4"))
    few = ("--rounds", "2", "--runs", "20") if context.quick else ()
    yield "lang-client: programs of one call, and of a fork of four", Script("lang/benchmarks/client.py", must, few)


def _quick(context: Context) -> tuple[str, ...]:
    return ("--quick",) if context.quick else ()


def _benchmark(name: str, title: str, summary: str, scripts: Scripts, *, only_by_name: bool = False) -> Benchmark:
    return Benchmark(name, title, summary, partial(run, scripts), only_by_name)


BENCHMARKS = (
    _benchmark("tree", "The byte radix tree", "match, ingest, memory of the picker's tree, events to routable", _tree),
    _benchmark("fleet", "Many endpoints", "picks among thousands of endpoints, and following them", _fleet),
    _benchmark("scrape", "Engines that push no load", "reading the metrics of a hundred engines", _scrape),
    _benchmark("engine", "The engine", "decode, prompts and a batch without HTTP, on a GPU if there is one", _engine),
    _benchmark("server", "The server", "the same requests offline and through HTTP, idle GPU, start", _server),
    _benchmark("vllm", "Beside vLLM", "a batch by this engine and by vLLM, on a GPU", _vllm, only_by_name=True),
    _benchmark("ranks", "One model on two GPUs", "as engine, with --tp-size 2", _ranks, only_by_name=True),
    _benchmark(
        "endurance", "Many streams for long", "a 70B shape on two GPUs for ten minutes", _endurance, only_by_name=True
    ),
    _benchmark("radix", "The radix cache", "its share of the time, and hit rates beside the best", _radix),
    _benchmark("tiers", "The cache on the host", "conversations that the device does not hold", _tiers),
    _benchmark("lora", "Adapters", "batches without adapters where they are served, and batches of many", _lora),
    _benchmark(
        "pairs", "Prompts apart from answers", "a pair beside two alone, on two GPUs", _pairs, only_by_name=True
    ),
    _benchmark("media", "Images", "a server that reads images: its rate, and what a shared image saves", _media),
    _benchmark("pull", "Pages of another server", "a long prompt pulled from a peer, or computed", _pull),
    _benchmark("cpu", "The engine on a CPU", "beside transformers.generate, the tiny model", _cpu),
    _benchmark("structured", "Structured output", "jump-forward, and what grammars cost", _structured),
    _benchmark(
        "speculation", "Speculative decoding", "tokens guessed ahead, n-grams, a head, and simulated", _speculation
    ),
    _benchmark(
        "lang-client",
        "The language's client",
        "CPU time of a program, by SGLang's (`make engine-wheels`)",
        _lang_client,
        only_by_name=True,
    ),
)


# ---- with a corpus of schemas -------------------------------------------------------------------------------

CORPUS = "structured-corpus"


def corpus(folder: Path, every: int) -> Benchmark:
    """`structured --corpus`: tries each Nth schema (`every`) of a folder from `make corpora`.

    Raises ValueError for any other folder.
    """
    if not any(folder.glob("data/*/*.json")):
        raise ValueError(f"--corpus {folder}: there are no schemas; `make corpora` makes .cache/jsonschemabench")

    def scripts(context: Context) -> Iterator[tuple[str, Script]]:
        must = ("corpus.outputs", "corpus.violations", "corpus.wrongly_taken", "corpus.compile_ms.p99")
        args = (str(folder), "--every", str(every * (100 if context.quick else 1)))
        script = Script("runtime/benchmarks/schema_corpus.py", must, args, limit_s=4 * 3600.0)
        yield "structured: schemas of a corpus", script

    command = f"structured --corpus .cache/{folder.name} --every {every}"
    title = "Schemas of the real world"
    return Benchmark(CORPUS, title, "which are taken, and held", partial(run, scripts), command=command)
