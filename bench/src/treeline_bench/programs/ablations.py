"""What is taken away from server and language, after figure 8 of SGLang's paper (Zheng et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ablation:
    """A server with these flags, and programs run so."""

    name: str
    title: str
    meaning: str
    cache: str = "radix"
    """`--prefix-cache`."""
    policy: str = "lpm"
    """`--schedule-policy`."""
    parallel: bool = True
    """Branches of a program run at once."""
    order: Literal["dfs", "given"] = "dfs"
    """In which programs of a batch are begun: those with equal beginnings one after another, or shuffled."""
    hints: bool = True
    """A fork says what its branches begin with before they begin, and a batch what all its programs begin with."""

    @property
    def flags(self) -> list[str]:
        """Of `treeline serve`."""
        return ["--prefix-cache", self.cache, "--schedule-policy", self.policy]


NONE = Ablation(
    "none",
    "No cache, no parallelism",
    "neither cache nor parallel branches: what throughput is compared with",
    cache="off",
    parallel=False,
    order="given",
    hints=False,
)
FULL = Ablation("full", "Full", "everything")
ABLATIONS: dict[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        NONE,
        # A hint fills a cache: where there is none it would only cost.
        Ablation("no_cache", "No cache", "every prompt is computed", cache="off", order="given", hints=False),
        Ablation("no_tree", "No tree", "a table: only whole prompts are found again", cache="whole-prompts"),
        Ablation("fcfs", "First come", "requests in the order in which they come", policy="fcfs", order="given"),
        Ablation("random", "Random order", "requests in random order", policy="random", order="given"),
        Ablation("no_parallelism", "No parallelism", "branches of a program one after another", parallel=False),
        Ablation("no_hint", "No hint", "forks do not say what their branches begin with", hints=False),
        FULL,
    )
}
