"""Rounds: the same prompts to each server, in alternating order."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treeline_bench.context import Display
from treeline_bench.results import number
from treeline_bench.serving.datasets import Texts
from treeline_bench.serving.messages import Conversation, LoadReport, Order, Progress, Record
from treeline_bench.serving.plan import Plan
from treeline_bench.serving.processes import Load
from treeline_bench.serving.server import Server, ServerError
from treeline_bench.serving.summary import Summary, summarise


@dataclass
class Measured:
    """One server's rounds."""

    server: Server
    rounds: list[Summary] = field(default_factory=list)


@dataclass
class Run:
    """All servers' rounds. `interrupted`: by Ctrl-C; the last summary then covers the requests so far."""

    measured: list[Measured]
    interrupted: bool = False

    @property
    def gone(self) -> str:
        """The first server that went away."""
        return next((one.gone for each in self.measured for one in each.rounds if one.gone), "")


def run(plan: Plan, servers: Sequence[Server], texts: Texts, limits: dict[str, float], display: Display) -> Run:
    """Raises ServerError if a warm-up request fails, DatasetError, ClientFailed."""
    found = Run([Measured(server) for server in servers])
    with tempfile.TemporaryDirectory(prefix="treeline-bench-") as name:
        folder = Path(name)
        if plan.warm_up:
            for server in servers:
                display.phase(f"{server.name}: warm-up", plan.warm_up)
                _check(server, _carry_out(plan.warm_up_order(server, texts), 1, folder, _follow(display)))
        try:
            _rounds(plan, found.measured, texts, limits, display, folder)
        except KeyboardInterrupt:
            found.interrupted = True
    return found


def _rounds(
    plan: Plan, all_measured: list[Measured], texts: Texts, limits: dict[str, float], display: Display, folder: Path
) -> None:
    """Runs until all are done or a server is gone."""
    for round_ in range(plan.rounds):
        display.phase("making prompts")
        conversations = plan.conversations(texts, round_)
        for measured in all_measured if round_ % 2 == 0 else all_measured[::-1]:
            display.phase(_title(measured.server, plan, round_), _requests(conversations))
            order = plan.order(measured.server, conversations, round_)
            _round(order, plan, folder, limits, measured, _follow(display))
            if measured.rounds[-1].gone:
                return


def _follow(display: Display) -> Callable[[Progress], None]:
    """Shows a load's progress."""
    seen, seen_at = Progress(0, 0, 0, 0), time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal seen, seen_at
        now = time.monotonic()
        rate = (progress.tokens - seen.tokens) / max(now - seen_at, 1e-3)
        note = f"{progress.running} running, {number(round(rate))} chunks/s"
        display.done(progress.ended, note + (f", {progress.failed} failed" if progress.failed else ""))
        seen, seen_at = progress, now

    return show


def _title(server: Server, plan: Plan, round_: int) -> str:
    return server.name if plan.rounds == 1 else f"{server.name}, round {round_ + 1} of {plan.rounds}"


def _requests(conversations: Sequence[Conversation]) -> int:
    return sum(len(conversation.turns) for conversation in conversations)


def _round(
    order: Order,
    plan: Plan,
    folder: Path,
    limits: dict[str, float],
    measured: Measured,
    progress: Callable[[Progress], None],
) -> None:
    """One load. After Ctrl-C (KeyboardInterrupt) a partial first round is kept; later ones would distort whole
    rounds."""
    with Load(order, plan.processes, folder) as load:
        try:
            reports = load.run(progress)
        except KeyboardInterrupt:
            reports = load.stop()
            if not measured.rounds and any(one.records for one in reports):
                measured.rounds.append(summarise(reports, limits))
            raise
    measured.rounds.append(summarise(reports, limits))


def _carry_out(order: Order, processes: int, folder: Path, progress: Callable[[Progress], None]) -> list[LoadReport]:
    with Load(order, processes, folder) as load:
        return load.run(progress)


def _check(server: Server, reports: Sequence[LoadReport]) -> None:
    """Raises ServerError for the first failed warm-up request."""
    failed = next((record for one in reports for record in one.records if record.error), None)
    if failed is not None:
        raise ServerError(f"{server.name}: {explain(failed)}")


def explain(record: Record) -> str:
    """A first request's error, with what to do."""
    said = f"{record.error}: {record.detail}" if record.detail else record.error
    match record.error:
        case "HTTP 401" | "HTTP 403":
            return f"{said}\nGive --api-key KEY, or OPENAI_API_KEY in the environment."
        case "HTTP 404":
            return f"{said}\nIs that its model (--model), and does it serve this path (--chat for the other one)?"
        case "HTTP 400" | "HTTP 422":
            return f"{said}\nIf it does not know ignore_eos: --respect-eos. Other fields: --extra-body."
        case "no usage":
            return (
                f"{said}: token counts would be guesses. The server has to know "
                'stream_options {"include_usage": true}; some gateways remove it.'
            )
        case "not a stream" | "not HTTP" | "cut short":
            return f"{said}\nIs this an OpenAI server, and does nothing on the way buffer or change its streams?"
        case _:
            return f"the first request failed: {said}"
