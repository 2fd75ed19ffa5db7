"""Helpers of the benchmarks' tests: a small model folder, a recording display, invented results."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from treeline_bench.metrics import row
from treeline_bench.results import Machine, Result

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(count: int = 120) -> list[str]:
    """Return invented words, the same every time."""
    rng = random.Random(5)
    return sorted({"".join(rng.choices(LETTERS, k=rng.randint(3, 8))) for _ in range(count)})


def train_tokenizer(vocabulary: list[str], size: int = 1200) -> Tokenizer:
    """Train a byte-level BPE tokenizer that learns whole words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(6)
    texts = [" " + " ".join(rng.choices(vocabulary, k=60)) for _ in range(80)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def model_folder(folder: Path) -> Path:
    """Write a tokenizer and a chat template in Hugging Face's layout; no weights."""
    train_tokenizer(words()).save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Remembered:
    """A display that records its phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str, total: int | None = None) -> None:
        self.phases.append(text if total is None else f"{text} ({total})")

    def done(self, parts: int, note: str = "") -> None:
        self.phases.append(str(parts))


def _routing_rows() -> list[tuple[str, float, float | None]]:
    rows: list[tuple[str, float, float | None]] = []
    for policy, rate, computed, ms in (
        ("treeline", 0.8, 27_000, 90),
        ("round_robin", 0.45, 76_000, 210),
        ("random", 0.42, 80_000, 230),
    ):
        rows += [
            (f"routing.hit_rate.{policy}", rate, 0.824),
            (f"routing.computed_tokens.{policy}", computed, 24_576),
            (f"routing.ttft_ms.p50.{policy}", ms, 230),
            (f"routing.ttft_ms.p99.{policy}", 3 * ms, 690),
            (f"routing.errors.{policy}", 0, None),
        ]
    return rows


def _programs_rows() -> list[tuple[str, float, float | None]]:
    rows: list[tuple[str, float, float | None]] = [
        ("programs.hit_vs_optimal.min", 0.99, None),
        ("programs.throughput_full_over_none.geomean", 3.2, None),
    ]
    for workload, times in (("mmlu", 5.0), ("judge", 2.0)):
        rows += [
            (f"programs.throughput_full_over_none.{workload}", times, None),
            (f"programs.throughput.{workload}.none", 1.0, None),
            (f"programs.throughput.{workload}.no_hint", 0.8 * times, 1.0),
            (f"programs.throughput.{workload}.full", times, 1.0),
            (f"programs.hit_rate.{workload}.full", 0.8, 0.81),
        ]
    return rows


INVENTED: dict[str, list[tuple[str, float, float | None]]] = {
    "routing": _routing_rows(),
    "routing-peers": [
        ("routing.peers.zipf.hit_vs.smg", 1.1, None),
        ("routing.peers.zipf.hit_vs.sglang-router", 0.9, None),
        ("routing.peers.zipf.ttft_p90_vs.smg", 0.8, None),
        ("routing.peers.zipf.ttft_p90_vs.sglang-router", 0.7, None),
        ("routing.peers.zipf.hit_rate.smg", 0.6, 0.8),
        ("routing.peers.zipf.late.smg", 3, None),
    ],
    "picker": [
        ("picker.added_ms.p50", 1.1, None),
        ("picker.added_ms.p99", 2.2, None),
        ("picker.bare_ms.p50", 0.2, None),
        ("picker.rps_per_core.1kb", 1500, None),
        ("picker.rps_per_core.220kb", 400, None),
        ("picker.errors", 0, None),
    ],
    "tree": [
        ("tree.match_us.2700", 15, None),
        ("tree.match_us.100k", 400, None),
        ("tree.ingest_blocks_s", 360_000, None),
        ("tree.bytes_per_block", 100, None),
    ],
    "vllm": [
        ("vllm.ours_tokens_s.llama8b", 11_000, None),
        ("vllm.offline_tokens_s.llama8b", 10_000, None),
        ("offline.vs_vllm.llama8b", 1.1, None),
    ],
    "engine": [
        ("engine.decode.llama8b.b1.ctx512", 4.0, 3.5),
        ("engine.prefill.llama8b.4096", 40_000, 52_000),
        ("engine.offline.llama8b", 12_000, None),
    ],
    "server": [
        ("server.offline_tokens_s.llama8b", 12_000, None),
        ("server.tokens_s.llama8b", 11_500, None),
        ("server_over_offline.llama8b", 0.958, None),
        ("overlap.idle_share.llama8b", 0.02, None),
        ("start.warm_s.llama8b", 9, None),
    ],
    "radix": [("radix.vs_optimal.mmlu", 0.99, None), ("radix.hit_vs_optimal", 0.97, None)],
    "cpu": [
        ("cpu.vs_transformers.b1", 1.4, None),
        ("cpu.vs_transformers.b8", 2.1, None),
        ("cpu.vs_transformers.mixed.b8", 2.5, None),
    ],
    "programs": _programs_rows(),
    "serving-random": [
        ("serving.output_tokens_s.treeline", 4000, 3000),
        ("serving.output_tokens_s.vllm", 3000, None),
        ("serving.ttft_ms.p90.treeline", 80, 120),
        ("serving.ttft_ms.p90.vllm", 120, None),
        ("serving.vs_vllm.random.throughput", 1.33, None),
    ],
    "operator": [
        ("operator.rss_mb.0", 80, None),
        ("operator.rss_mb.500", 150, None),
        ("operator.apply_s.p50", 0.2, None),
        ("operator.apply_s.p95", 0.8, None),
        ("operator.idle_writes", 0, None),
        ("epp.models_consistent_s", 0.2, None),
    ],
}


def invented_result(name: str) -> Result:
    """Return a result with plausible numbers, for tests of tables and plots."""
    return Result(
        benchmark=name,
        date="2026-11-20",
        machine=Machine(2, "Some CPU", 23.5, "Debian"),
        versions={"python": "3.11.7", "envoy": "1.40.0"},
        command=f"python -m treeline_bench {name}",
        rows=[row(metric, value, reference) for metric, value, reference in INVENTED[name]],
    )
