"""A batch of requests by this engine, and by vLLM on the same GPU: output tokens a second.

    python runtime/benchmarks/versus_vllm.py --shape llama8b --vllm-path /opt/vllm/site-packages

Both have random weights, bfloat16, a context of 8,192 and at most 256 sequences at once, and else their defaults. Each
has the device for itself, one after the other, in its own process, and computes the same requests: 256 with 100 to
1,024 tokens in and out, temperature 0.6, new ones each round. A short first round warms up and is not counted. A row of
JSON each:

- `vllm.offline_tokens_s.SHAPE`, `vllm.ours_tokens_s.SHAPE`: the median of the rounds.
- `offline.vs_vllm.SHAPE`: ours ÷ theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from work import Work

CONTEXT, SEQUENCES = 8192, 256
LIMIT_S = 900.0
VLLM = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}

Compute = Callable[[Work], None]


def ours(folder: str, ranks: int) -> Compute:
    from treeline_runtime import Engine, SamplingParams

    engine = Engine(folder, load_format="dummy", context_length=CONTEXT, max_running_requests=SEQUENCES, tp_size=ranks)

    def compute(work: Work) -> None:
        lengths = [SamplingParams(temperature=0.6, ignore_eos=True, max_new_tokens=n) for n in work.lengths]
        outputs = engine.generate(work.prompts, lengths)
        assert [len(each.token_ids) for each in outputs] == work.lengths

    return compute


def theirs(folder: str, ranks: int) -> Compute:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=CONTEXT,
        max_num_seqs=SEQUENCES, gpu_memory_utilization=0.85, tensor_parallel_size=ranks,
    )  # fmt: skip

    def compute(work: Work) -> None:
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        lengths = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in work.lengths
        ]
        outputs = llm.generate(prompts, lengths, use_tqdm=False)
        assert [len(each.outputs[0].token_ids) for each in outputs] == work.lengths

    return compute


ENGINES: dict[str, Callable[[str, int], Compute]] = {"vllm": theirs, "ours": ours}


def measure(compute: Compute, works: list[Work], rates: Path) -> None:
    """Writes tokens a second of each work into a file, since engines print much on their output."""
    compute(Work.of(8, 64, seed=-1))
    found = []
    for work in works:
        started = time.perf_counter()
        compute(work)
        found.append(sum(work.lengths) / (time.perf_counter() - started))
    rates.write_text(json.dumps(found))


def by(engine: str, folder: Path, arguments: list[str], path: str | None) -> float:
    """Measures one engine in its own process; returns the median of the rounds. Raises SystemExit with the end of its
    log."""
    rates, log = folder / f"{engine}.json", folder / f"{engine}.log"
    environment = os.environ | ((VLLM | ({"PYTHONPATH": path} if path else {})) if engine == "vllm" else {})
    with log.open("w") as said:
        command = [sys.executable, __file__, *arguments, "--by", engine, "--folder", str(folder)]
        code = subprocess.run(command, stdout=said, stderr=said, env=environment, timeout=LIMIT_S).returncode
    if code or not rates.exists():
        raise SystemExit(f"{engine} ended with status {code}:\n{log.read_text(errors='replace')[-3000:]}")
    return statistics.median(json.loads(rates.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="as of engine.py")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="GPUs that share the model (default: 1)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm-path", metavar="DIR", help="where vLLM is installed, if not beside this engine")
    parser.add_argument("--by", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.by:
        works = [Work.of(256, 1024, seed) for seed in range(args.rounds)]
        measure(ENGINES[args.by](args.folder, args.ranks), works, Path(args.folder) / f"{args.by}.json")
        return 0
    from dummy_model import write_config
    from engine import report

    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), args.shape)
        other, mine = (by(engine, Path(name), sys.argv[1:], args.vllm_path) for engine in ENGINES)
    report(f"vllm.ours_tokens_s.{args.shape}", mine)
    report(f"vllm.offline_tokens_s.{args.shape}", other)
    report(f"offline.vs_vllm.{args.shape}", mine / other)
    return 0


if __name__ == "__main__":
    sys.exit(main())
