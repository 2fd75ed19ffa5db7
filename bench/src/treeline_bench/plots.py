"""SVG plots of results: titles say the finding, and the same result gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure

from treeline_bench import corpus
from treeline_bench.colours import OTHER, OURS, REFERENCE
from treeline_bench.drawing import LABEL, draw_bars, draw_expected, draw_line, new_figure, size_of
from treeline_bench.metrics import metric
from treeline_bench.programs import plot as programs
from treeline_bench.results import Result, number
from treeline_bench.serving.datasets import DATASETS

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "treeline",
    "svg.fonttype": "path",  # looks the same wherever it is shown
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 14,
    "figure.titleweight": "bold",
}

POLICIES = ("treeline", "round_robin", "random")


def plot(result: Result, path: Path) -> Path:
    """Draw `result` into the SVG file `path`. Raises KeyError for a benchmark without a plot."""
    draw = PLOTS[result.benchmark]
    with mpl.rc_context(STYLE):
        figure = draw(result)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _routing(result: Result) -> Figure:
    computed = {policy: result.value(f"routing.computed_tokens.{policy}") for policy in POLICIES}
    fewer = computed["random"] / max(computed["treeline"], 1)
    note = f"shared prefixes, 2 CPU runtimes with one torch thread each; {size_of(result)}"
    figure, axes = new_figure(f"Prefix-aware routing computes {fewer:.1f}× fewer prompt tokens than random", 3, note)
    labels = [policy.replace("_", "\n") for policy in POLICIES]
    colours = [OURS, OTHER, OTHER]

    rates = [100 * result.value(f"routing.hit_rate.{policy}") for policy in POLICIES]
    draw_bars(axes[0], labels, rates, colours)
    axes[0].set(title="Prompt tokens from the cache", ylabel="hit rate (%)", ylim=(0, 100))
    oracle = result.row("routing.hit_rate.treeline").reference
    if isinstance(oracle, float | int):
        draw_line(axes[0], 100 * oracle, "oracle", bars=3)

    draw_bars(axes[1], labels, [computed[policy] / 1000 for policy in POLICIES], colours)
    axes[1].set(title="Prompt tokens computed", ylabel="thousand tokens")

    for offset, quantile, shade in ((-0.2, "p50", 1.0), (0.2, "p99", 0.55)):
        times = [result.value(f"routing.ttft_ms.{quantile}.{policy}") for policy in POLICIES]
        places = [index + offset for index in range(len(POLICIES))]
        bars = axes[2].bar(places, times, width=0.38, color=colours, alpha=shade)
        axes[2].bar_label(bars, labels=[f"{number(value)}\n{quantile}" for value in times], padding=2, fontsize=9)
    axes[2].set_xticks(range(len(POLICIES)), labels)
    axes[2].margins(y=0.2)
    axes[2].set(title="Time to first token", ylabel="ms")
    return figure


def _picker(result: Result) -> Figure:
    added = [result.value(f"picker.added_ms.{quantile}") for quantile in ("p50", "p99")]
    rates = [result.value(f"picker.rps_per_core.{size}") for size in ("1kb", "220kb")]
    title = f"Asking the picker costs {number(added[0])} ms; one core decides {number(rates[0])} requests/s"
    figure, axes = new_figure(title, 2, f"one Envoy worker, picker on a core of its own; {size_of(result)}")
    draw_bars(axes[0], ["median", "99th percentile"], added, [OURS, OURS])
    axes[0].set(title="Latency added to bare Envoy", ylabel="ms")
    draw_expected(axes[0], result.row("picker.added_ms.p50"), "expected median, at most")
    draw_bars(axes[1], ["1 KB body", "220 KB body"], rates, [OURS, OURS])
    axes[1].set(title="Decisions per core", ylabel="requests per CPU-second")
    draw_expected(axes[1], result.row("picker.rps_per_core.1kb"), "expected at 1 KB, at least")
    return figure


def _gie(result: Result) -> Figure:
    sizes = ("1kb", "30kb", "220kb")
    ratios = [result.value(f"gie.vs_gie.rps_per_core.{size}") for size in sizes]
    title = (
        f"Our picker decides {number(min(ratios))} to {number(max(ratios))} times as many requests per core as GIE's"
    )
    figure, axes = new_figure(title, 2, f"one Envoy worker, pickers on a core of their own; {size_of(result)}")
    draw_bars(axes[0], ["1 KB", "30 KB", "220 KB"], ratios, [OURS] * 3)
    axes[0].set(title="Requests per CPU-second ÷ GIE 1.5's, at least", ylabel="×")
    added = [result.value(f"gie.added_ms.p{q}") for q in (50, 99)]
    draw_bars(axes[1], ["median", "99th percentile"], added, [OURS, OURS])
    axes[1].set(title="Latency added to bare Envoy, at most", ylabel="ms")
    return figure


def _tree(result: Result) -> Figure:
    """Each figure as a multiple of what was expected, since their units differ; longer is better for all."""
    rows = [row for row in result.rows if row.ratio]
    times = [row.ratio if metric(row.metric).better == "higher" else 1 / row.ratio for row in rows if row.ratio]
    match = result.value("tree.match_us.2700")
    figure, (axes,) = new_figure(f"The tree matches a 2,700-token prompt in {number(match)} µs", 1, size_of(result))
    figure.set_size_inches(8.6, 4.0)
    labels = [row.metric.removeprefix("tree.") for row in rows]
    bars = axes.barh(labels, times, color=[OURS if times_ >= 1 else REFERENCE for times_ in times], height=0.6)
    texts = [f"{number(row.value)} {row.unit}" for row in rows]
    axes.bar_label(bars, labels=texts, **LABEL)
    axes.axvline(1, color=REFERENCE, linestyle="--", linewidth=1.3, label="as expected")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.28)
    axes.set(title="How much better than expected", xlabel="times the expected speed (or as small)")
    return figure


def _chat(result: Result) -> Figure:
    inline, worker = result.row("chat.render_us.4k"), result.row("chat.worker_us.4k")
    figure, (axes,) = new_figure(f"A chat of 4 KB is rendered in {number(inline.value)} µs", 1, size_of(result))
    figure.set_size_inches(6.4, 4.4)
    draw_bars(axes, ["inline", "by a worker"], [inline.value, worker.value], [OURS, OTHER])
    draw_expected(axes, inline, "the bound in the picker")
    axes.set(title="Median time of one rendering", ylabel="µs")
    return figure


def _tokenization(result: Result) -> Figure:
    rows = [row for row in result.rows if row.metric.startswith("tokenization.speedup.")]
    turn_us = number(result.value("tokenization.turn_us"))
    figure, (axes,) = new_figure(f"A new turn is tokenized in {turn_us} µs", 1, size_of(result))
    draw_bars(axes, [row.metric.rpartition(".")[2] for row in rows], [row.value for row in rows], [OURS] * len(rows))
    axes.set(title="Against tokenizing the whole", ylabel="times as fast", xlabel="characters of the conversation")
    return figure


def _http(result: Result) -> Figure:
    answers, computed = result.row("http.requests_s"), result.row("http.cpu_us")
    figure, axes = new_figure(f"{number(answers.value)} small completions a second", 2, size_of(result))
    for axis, row, title in (
        (axes[0], answers, "Answers a second"),
        (axes[1], computed, "What the HTTP process computes for one"),
    ):
        draw_bars(axis, [""], [row.value], [OURS])
        axis.set(title=title, ylabel=row.unit)
    return figure


def _sampling(result: Result) -> Figure:
    equal, compared = result.row("sampling.equal").value, result.row("sampling.compared").value
    same = round(equal * compared)
    figure, axes = new_figure(f"{same} of {compared:.0f} seeded answers are the same among others", 1, size_of(result))
    draw_bars(axes[0], ["the same", "another"], [same, compared - same], [OURS, OTHER])
    axes[0].set(title="Alone and 64 at once", ylabel="answers")
    return figure


def _bodies(result: Result) -> Figure:
    waits = [row for row in result.rows if row.metric.startswith("bodies.live_ms.")]
    memory = [row for row in result.rows if row.metric.startswith("bodies.rss_mb.")]
    longest = number(max(row.value for row in waits))
    figure, axes = new_figure(f"A hostile body delays others by {longest} ms at most", 2, size_of(result))
    for axis, rows, title in (
        (axes[0], waits, "Longest wait for /live"),
        (axes[1], memory, "Memory at most"),
    ):
        labels = [row.metric.rpartition(".")[2].removesuffix("mb") + " MB" for row in rows]
        draw_bars(axis, labels, [row.value for row in rows], [OURS] * len(rows))
        axis.set(title=title, ylabel=rows[0].unit, xlabel="prompt")
    return figure


def _fleet(result: Result) -> Figure:
    counts = (1000, 5000)
    times = [result.value(f"picker.pick_ms.{count}") for count in counts]
    title = f"One of 1,000 endpoints is chosen in {number(times[0])} ms"
    figure, (axes,) = new_figure(title, 1, size_of(result))
    draw_bars(axes, [f"{count:,} endpoints" for count in counts], times, [OURS, OURS])
    axes.set(title="One choice, median", ylabel="ms of CPU time")
    return figure


def _scrape(result: Result) -> Figure:
    cores = result.value("scrape.cores.100")
    title = f"The load of 100 silent engines takes {number(cores)} of a core"
    figure, (axes,) = new_figure(title, 1, size_of(result))
    draw_bars(axes, ["100 engines"], [cores], [OURS])
    axes.set(title="Reading their metrics", ylabel="cores")
    draw_expected(axes, result.row("scrape.cores.100"), "at most", bars=1)
    return figure


def _lang_client(result: Result) -> Figure:
    names = {"call": "one call", "fork4": "a fork of four"}
    ratios = [result.value(f"lang.vs_sglang.{name}") for name in names]
    title = f"A program costs its client {number(min(ratios))} to {number(max(ratios))} of SGLang's CPU time"
    figure, axes = new_figure(title, 2, size_of(result))
    for axis, (name, what) in zip(axes, names.items(), strict=True):
        values = [result.value(f"lang.cpu_ms.{side}.{name}") for side in ("ours", "theirs")]
        draw_bars(axis, ["Treeline", "SGLang"], values, [OURS, OTHER])
        axis.set(title=what, ylabel="ms of a CPU")
    return figure


def _operator(result: Result) -> Figure:
    quantiles = ("p50", "p95")
    apply_s = [result.value(f"operator.apply_s.{quantile}") for quantile in quantiles]
    memory = [row for row in result.rows if row.metric.startswith("operator.rss_mb.")]
    note = f"real API server, no kubelet; all on {size_of(result)}"
    title = f"19 of 20 changes of a pool have reached its children within {number(apply_s[1])} s"
    figure, axes = new_figure(title, 3, note)
    draw_bars(axes[0], ["median", "95th percentile"], apply_s, [OURS, OURS])
    axes[0].set(title="Change to last child applied", ylabel="s")
    draw_expected(axes[0], result.row("operator.apply_s.p95"), "expected, at most", bars=2, first=1)
    sizes = [row.metric.rpartition(".")[2] for row in memory]
    draw_bars(axes[1], [f"{size} pools" for size in sizes], [row.value for row in memory], [OURS] * len(memory))
    axes[1].set(title="Memory of the operator", ylabel="MB resident")
    for place, row in enumerate(memory):
        label = "_the same" if place else "expected, at most"  # matplotlib lists no label that begins so
        draw_expected(axes[1], row, label, first=place, bars=place + 1)
    consistent = result.row("epp.models_consistent_s")
    draw_bars(axes[2], ["1,000 changed models"], [consistent.value], [OURS])
    axes[2].set(title="Last change to the picker's list being true", ylabel="s", xlim=(-1, 1))
    draw_expected(axes[2], consistent, "expected, at most")
    return figure


def _one_gateway(result: Result) -> Figure:
    cpu = [row for row in result.rows if row.metric.startswith("operator.one_gateway.cpu_ms.")]
    looks = [row for row in result.rows if row.metric.startswith("operator.one_gateway.reconciles.")]
    times = number(cpu[-1].value / cpu[0].value)
    sizes = [row.metric.rpartition(".")[2] for row in cpu]
    title = f"Of {sizes[-1]} pools of one gateway, each costs {times} times what it costs of {sizes[0]}"
    figure, axes = new_figure(title, 2, size_of(result))
    for axis, rows, what in (
        (axes[0], cpu, "Processor of the operator"),
        (axes[1], looks, "Reconciliations"),
    ):
        draw_bars(axis, sizes, [row.value for row in rows], [OURS] * len(rows))
        axis.set(title=f"{what}, for each pool", ylabel=rows[0].unit, xlabel="pools")
    return figure


def _throttled(result: Result) -> Figure:
    figure, (axes,) = new_figure("200 pools at once, with a fifth of a processor: seconds", 1, size_of(result))
    rows = [row for row in result.rows if row.unit == "s"]
    names = ["each has a status", "each is judged", "each child is there", "processor"]
    draw_bars(axes, names, [row.value for row in rows], [OURS] * len(names))
    return figure


def _engine(result: Result) -> Figure:
    """How near each figure is to the device's limit."""
    rows = [row for row in result.rows if row.ratio]
    reached = [
        100 * (row.ratio if metric(row.metric).better == "higher" else 1 / row.ratio) for row in rows if row.ratio
    ]
    figure, (axes,) = new_figure("The engine beside what the device could do", 1, size_of(result))
    figure.set_size_inches(8.6, 4.4)
    if not rows:  # a CPU, or a quick run
        rows = [row for row in result.rows if row.metric.startswith("engine.offline")]
        reached = [0.0] * len(rows)
    bars = axes.barh([row.metric.removeprefix("engine.") for row in rows], reached, color=OURS, height=0.6)
    axes.bar_label(bars, labels=[f"{number(row.value)} {row.unit}" for row in rows], **LABEL)
    axes.axvline(100, color=REFERENCE, linestyle="--", linewidth=1.3)
    axes.invert_yaxis()
    axes.set(title="Share of the limit", xlabel="%", xlim=(0, 130))
    return figure


def _server(result: Result) -> Figure:
    offline, served = ("server.offline_tokens_s.", "server.tokens_s.")
    shapes = [row.metric.removeprefix(offline) for row in result.rows if row.metric.startswith(offline)]
    ratio = result.value(f"server_over_offline.{shapes[0]}")
    title = f"Through HTTP the engine keeps {100 * ratio:.0f} % of its speed"
    figure, axes = new_figure(title, len(shapes), size_of(result))
    for axis, shape in zip(axes, shapes, strict=True):
        values = [result.value(name + shape) for name in (offline, served)]
        draw_bars(axis, ["offline", "through HTTP"], values, [OTHER, OURS])
        axis.set(title=shape, ylabel="tokens/s")
    return figure


def _vllm(result: Result) -> Figure:
    ours, other = ("vllm.ours_tokens_s.", "vllm.offline_tokens_s.")
    shapes = [row.metric.removeprefix(ours) for row in result.rows if row.metric.startswith(ours)]
    ratios = ", ".join(f"{result.value('offline.vs_vllm.' + shape):.2f} ({shape})" for shape in shapes)
    figure, axes = new_figure(f"Offline, times as fast as vLLM: {ratios}", len(shapes), size_of(result))
    for axis, shape in zip(axes, shapes, strict=True):
        draw_bars(axis, ["treeline", "vLLM"], [result.value(name + shape) for name in (ours, other)], [OURS, OTHER])
        axis.set(title=shape, ylabel="tokens/s")
    return figure


def _engines(result: Result, engine: str = "vLLM") -> Figure:
    of = f"engines.{engine.lower()}"
    share = result.value(f"{of}.hit_vs_oracle")
    title = f"Two {engine} servers: {100 * share:.1f} % of the hits that one endless cache would have"
    figure, axes = new_figure(title, 2, size_of(result))
    for axis, name, what, unit in (
        (axes[0], f"{of}.hit_rate.", "Prompt tokens from the cache", "share"),
        (axes[1], f"{of}.ttft_ms.p50.", "Time to first token, median", "ms"),
    ):
        values = {row.metric.removeprefix(name): row.value for row in result.rows if row.metric.startswith(name)}
        colours = [OURS if policy == "treeline" else OTHER for policy in values]
        draw_bars(axis, [policy.replace("_", " ") for policy in values], list(values.values()), colours)
        axis.set(title=what, ylabel=unit)
    return figure


def _radix(result: Result) -> Figure:
    name = "radix.vs_optimal."
    rows = [row for row in result.rows if row.metric.startswith(name)]
    found = result.value("radix.hit_vs_optimal")
    title = f"The radix cache finds {100 * found:.1f} % of what could be found"
    figure, (axes,) = new_figure(title, 1, size_of(result))
    figure.set_size_inches(8.6, 4.4)
    bars = axes.barh(
        [row.metric.removeprefix(name).replace("_", " ") for row in rows],
        [100 * row.value for row in rows],
        color=OURS,
        height=0.6,
    )
    axes.bar_label(bars, labels=[f"{100 * row.value:.1f}" for row in rows], **LABEL)
    axes.invert_yaxis()
    axes.set(title="Programs in the shapes of SGLang's paper", xlabel="% of the optimum", xlim=(0, 115))
    return figure


def _cpu(result: Result) -> Figure:
    rows = [row for row in result.rows if row.metric.startswith("cpu.vs_transformers.")]
    title = f"On a CPU {number(max(row.value for row in rows))} times as fast as transformers, at best"
    figure, (axes,) = new_figure(title, 1, size_of(result))
    figure.set_size_inches(6.4, 4.4)
    labels = [row.metric.removeprefix("cpu.vs_transformers.").replace(".", " ") for row in rows]
    draw_bars(axes, labels, [row.value for row in rows], [OURS] * len(rows))
    draw_line(axes, 1.0, "transformers.generate", bars=len(rows))
    axes.set(title="Output, the tiny model", ylabel="times as fast")
    return figure


def _structured(result: Result) -> Figure:
    name = "structured.jump_forward_speedup."
    rows = [row for row in result.rows if row.metric.startswith(name)]
    title = f"JSON at least {number(min(row.value for row in rows))} times as fast where forced text is not sampled"
    figure, (axes,) = new_figure(title, 1, size_of(result))
    figure.set_size_inches(8.6, 4.4)
    labels = [row.metric.removeprefix(name + "s").replace(".b", " %\n× ") for row in rows]
    draw_bars(axes, labels, [row.value for row in rows], [OURS] * len(rows))
    draw_line(axes, 1.0, "all of it sampled", bars=len(rows))
    axes.set(title="By the share of forced text, and requests at once", ylabel="times as fast")
    return figure


def _chaos(result: Result) -> Figure:
    names = ("chaos.gap.", "chaos.total.")
    values = {row.metric: row.value for row in result.rows if row.metric.startswith(names)}
    worst = max(value for name, value in values.items() if name.endswith("_by_control"))
    title = f"Free requests wait at most {number(worst)} times as long beside grammars as beside free ones"
    figure, axes = new_figure(title, 2, size_of(result))
    for axis, name, what in zip(axes, names, ("Between tokens", "Whole answers"), strict=True):
        bars = {key.removeprefix(name): value for key, value in values.items() if key.startswith(name)}
        draw_bars(axis, [key.replace("_by_", "\n÷ ") for key in bars], list(bars.values()), [OURS] * len(bars))
        draw_line(axis, 1.5, "bound", bars=len(bars))
        axis.set(title=f"{what}, p99", ylabel="times")
    return figure


def _serving(result: Result) -> Figure:
    """Output and waiting for the first token, a bar a server; one that never showed a token has no second one."""
    rates, waits = (
        {row.metric.removeprefix(name): row.value for row in result.rows if row.metric.startswith(name)}
        for name in ("serving.output_tokens_s.", "serving.ttft_ms.p90.")
    )
    first = next(iter(rates))
    title = f"{first}: {number(rates[first])} tokens/s of {result.benchmark.removeprefix('serving-')}"
    figure, axes = new_figure(title, 2, size_of(result))
    for axis, bars, what, unit in (
        (axes[0], rates, "Output", "tokens/s"),
        (axes[1], waits, "Time to first token, 90th percentile", "ms"),
    ):
        draw_bars(axis, list(bars), list(bars.values()), [OURS if name == first else OTHER for name in bars])
        axis.set(title=what, ylabel=unit)
    return figure


def _routing_sim(result: Result) -> Figure:
    """Our hit rate and waits on each trace, as a share of the best there is."""
    endings = ("hit_vs_oracle", "ttft_p90_vs_best")
    found = {
        ending: {
            row.metric.split(".")[1]: row.value
            for row in result.rows
            if row.metric.endswith(f".{ending}") and ".faults." not in row.metric
        }
        for ending in endings
    }
    least = min(found["hit_vs_oracle"].values())
    title = f"At least {100 * least:.0f} % of the hits of routers that know every cache"
    figure, axes = new_figure(title, 2, "8 simulated engines of Llama-3.1-8B on an H200")
    figure.set_size_inches(11, 4.8)
    for axis, ending, bound, what in (
        (axes[0], endings[0], 0.98, "Hit rate ÷ the better oracle's"),
        (axes[1], endings[1], 1.05, "TTFT p90 ÷ the best other policy's"),
    ):
        values = found[ending]
        missed = {name: (value < bound) == (ending == endings[0]) and value != bound for name, value in values.items()}
        colours = [REFERENCE if missed[name] else OURS for name in values]
        bars = axis.barh(list(values), list(values.values()), color=colours, height=0.6)
        axis.bar_label(bars, labels=[f"{value:.3f}" for value in values.values()], **LABEL)
        axis.axvline(bound, color=REFERENCE, linestyle="--", linewidth=1.3)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set(title=what)
    return figure


def _routing_peers(result: Result) -> Figure:
    """Our hit rate and waits, as a multiple of each other router's."""
    figure, axes = new_figure("Our picker beside other routers", 2, f"3 simulated engines, {size_of(result)}")
    for axis, ending, what in zip(axes, ("hit_vs", "ttft_p90_vs"), ("Hit rate", "TTFT p90"), strict=True):
        found = {row.metric.rpartition(".")[2]: row.value for row in result.rows if f".{ending}." in row.metric}
        draw_bars(axis, list(found), list(found.values()), [OURS] * len(found))
        axis.set(title=f"{what}: ours ÷ theirs")
        axis.axhline(1.0, color=REFERENCE, linestyle="--", linewidth=1.3)
    return figure


PLOTS: dict[str, Callable[[Result], Figure]] = {
    "routing": _routing,
    "routing-sim": _routing_sim,
    "routing-peers": _routing_peers,
    "picker": _picker,
    "gie": _gie,
    "tree": _tree,
    "chat": _chat,
    "bodies": _bodies,
    "http": _http,
    "sampling": _sampling,
    "tokenization": _tokenization,
    "engine": _engine,
    "server": _server,
    "vllm": _vllm,
    "engines": _engines,
    "engines-sglang": partial(_engines, engine="SGLang"),
    "radix": _radix,
    "cpu": _cpu,
    "structured": _structured,
    corpus.NAME: corpus.draw,
    "programs": programs.draw,
    "chaos": _chaos,
    "fleet": _fleet,
    "scrape": _scrape,
    "lang-client": _lang_client,
    "operator": _operator,
    "one-gateway": _one_gateway,
    "operator-throttled": _throttled,
    **{f"structured-{shape}": _structured for shape in ("llama8b", "qwen3_0_6b")},
    **{f"serving-{name}": _serving for name in DATASETS},
}
