"""Counts the real-world schemas that are accepted, and checks that outputs under them are valid.

    python runtime/benchmarks/schema_corpus.py .cache/jsonschemabench        # made by `make corpora`
    python runtime/benchmarks/schema_corpus.py .cache/jsonschemabench --every 8

Each schema of JSONSchemaBench (`data/SPLIT/*.json`) and of MaskBench (`maskbench/data/*.json`, with instances that are
valid and invalid) is compiled. For each accepted schema, texts are drawn token by token under its masks with the tiny
model's vocabulary, and `jsonschema` validates them, with formats. Prints rows of JSON:

- `corpus.accepted.SET` and `corpus.accepted.SET.SPLIT`: the share that is accepted.
- `corpus.outputs`, `corpus.violations`: texts that ended, and the invalid ones among them.
- `corpus.refused.WORD`: number of schemas refused for a keyword, or for another reason.
- `corpus.wrongly_taken`: invalid instances that a schema's grammar accepts. `corpus.rightly_taken`: the share of valid
  instances that it accepts; others have their members in another order, or the grammar is narrower than the schema.
- `corpus.compile_ms.p50` and `.p99`: CPU time of a compilation.

The reasons of refusals and the errors in outputs go to standard error.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.grammar_schemas import judge, parse  # noqa: E402
from support.grammar_walks import Walker, tiny_vocabulary  # noqa: E402
from treeline_runtime.grammar.backend import Compiled, GrammarError  # noqa: E402
from treeline_runtime.grammar.backends import Backends  # noqa: E402
from treeline_runtime.messages import Grammar  # noqa: E402

WALKS = 2
"""Texts of each schema."""


class Run:
    """Counts over all schemas."""

    def __init__(self, seed: int) -> None:
        self._vocabulary = tiny_vocabulary()
        self._bytes = {text[0]: i for i, text in reversed([*enumerate(self._vocabulary.texts)]) if len(text) == 1}
        self._backend = Backends(self._vocabulary)
        self._walker = Walker(self._backend, self._vocabulary)
        self._seed = seed
        self.taken: dict[str, list[bool]] = collections.defaultdict(list)
        self.reasons = collections.Counter[str]()
        self.seconds: list[float] = []
        self.counts = collections.Counter[str]()

    def schema(self, split: str, name: str, schema: Any, instances: list[Any]) -> None:
        began = time.process_time()
        compiled, why = self._compiled(schema)
        self.seconds.append(time.process_time() - began)
        for part in (split.partition(".")[0], split):
            self.taken[part].append(compiled is not None)
        if compiled is None:
            self.reasons[_kind(why)] += 1
            _tell(f"{name}: {why}")
            return
        self._outputs(name, schema, compiled)
        for instance in instances:
            takes, valid = self._takes(compiled, instance["data"]), instance["valid"]
            self.counts[f"{'valid' if valid else 'invalid'}{' taken' * takes}"] += 1
            if takes and not valid:
                _tell(f"{name}: takes {instance['data']!r}")

    def _compiled(self, schema: Any) -> tuple[Compiled | None, str]:
        try:
            return self._backend.load(self._backend.compile(Grammar("json", json.dumps(schema)))), ""
        except GrammarError as error:
            return None, str(error)

    def _outputs(self, name: str, schema: Any, compiled: Compiled) -> None:
        for i in range(WALKS):
            walk = self._walker.walk(compiled, self._seed + i, 24, 400, probe=0)
            if not walk.whole:
                continue
            self.counts["outputs"] += 1
            if why := _wrong(schema, walk.text.decode()):
                self.counts["violations"] += 1
                _tell(f"{name}: {walk.text.decode()!r}: {why}")

    def _takes(self, compiled: Compiled, value: Any) -> bool:
        matcher = compiled.matcher(self._vocabulary.stop_ids)
        text = json.dumps(value, ensure_ascii=False).encode()
        return all(matcher.accept(self._bytes[byte]) for byte in text) and matcher.completed


def _wrong(schema: Any, text: str) -> str:
    error = next(judge(schema).iter_errors(parse(text)), None)
    return "" if error is None else f"{error.message[:200]} at {error.json_path}"


def _kind(why: str) -> str:
    """The keyword that a refusal names, or its kind."""
    if word := re.match(r"'(\$?\w+)' at ", why):
        return word[1]
    kinds = {"satisf": "unsatisfiable", "pattern": "pattern", "itself": "circular", "circular": "circular"}
    return next((kind for part, kind in kinds.items() if part in why), "other")


def _tell(text: str) -> None:
    sys.stderr.write(text[:1000] + "\n")


def _schemas(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob("data/*/*.json")):
        yield f"jsonschemabench.{path.parent.name}", path
    for path in sorted(folder.glob("maskbench/data/*.json")):
        name = path.stem
        yield f"maskbench.{name.partition('---')[0] if '---' in name else name.rpartition('_')[0]}", path


def report(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": f"corpus.{metric}", "value": value}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only each so many-th schema")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    run = Run(args.seed)
    for split, path in [*_schemas(args.folder)][:: args.every]:
        content = json.loads(path.read_text())
        is_mask = split.startswith("maskbench.")
        run.schema(split, path.stem, *((content["schema"], content.get("tests", [])) if is_mask else (content, [])))
    for split, taken in sorted(run.taken.items()):
        report(f"accepted.{split}", sum(taken) / len(taken))
    for why, count in run.reasons.most_common():
        report(f"refused.{why}", count)
    counts, seconds = run.counts, sorted(run.seconds)
    report("outputs", counts["outputs"])
    report("violations", counts["violations"])
    report("wrongly_taken", counts["invalid taken"])
    report("rightly_taken", counts["valid taken"] / max(1, counts["valid taken"] + counts["valid"]))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        report(f"compile_ms.{name}", 1000 * seconds[int(share * (len(seconds) - 1))])


if __name__ == "__main__":
    main()
