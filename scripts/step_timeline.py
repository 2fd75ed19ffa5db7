"""Draws what CPU and GPU do at the same time: an SVG beside each record of runtime/benchmarks/step_timeline.py.

`python scripts/step_timeline.py docs/img/step-timeline.json`
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = {
    "cpu": {
        "schedule": ("#4e79a7", "receive and choose"),
        "prepare": ("#76b7b2", "prepare"),
        "launch": ("#f28e2b", "launch"),
        "wait": ("#e4e4e4", "wait for the tokens"),
        "process": ("#59a14f", "process them"),
        "masks": ("#d37295", "masks of grammars"),
        "sample": ("#9c755f", "sample by them"),
        "send": ("#b07aa1", "send"),
    },
    "gpu": {
        "products": ("#e15759", "products"),
        "attention": ("#edc948", "attention"),
        "rest": ("#8c8c8c", "norms, rope, sampling, copies"),
    },
}
ENTERING, LEAVING = ("launch",), ("wait",)
TOPS = {"cpu": 72, "gpu": 150}
LEFT, WIDTH, HEIGHT, LANE = 56, 1040, 290, 44
STYLE = "text { font: 12px system-ui, sans-serif; fill: #222 } .small { font-size: 11px; fill: #555 }"


def step_name(step: int) -> str:
    return "n" if step == 0 else f"n{step:+d}".replace("-", "−")


def text(x: float, y: float, words: str, *, anchor: str = "start", small: bool = False) -> str:
    kind = ' class="small"' if small else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{height}" fill="{colour}"/>'


def drawn(record: dict[str, Any]) -> str:
    """`record`: `about`, and spans [what, step, start, end] in microseconds of the lanes `cpu` and `gpu`."""
    total = max(end for lane in COLOURS for *_, end in record[lane])
    scale = WIDTH / total
    about = record["about"]
    steps = sorted({step for _, step, _, _ in record["gpu"]})
    grammars = " with a grammar each" if about.get("grammars") else ""
    said = (
        f"{about['batch']} sequences{grammars} of about {about['context']} tokens, {about['shape']}, {about['device']}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 24} {HEIGHT}" role="img">',
        f"<title>{len(steps)} decode steps: what CPU and GPU do at the same time</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="100%" height="100%" fill="#fff"/>{text(LEFT, 24, said)}',
    ]
    for lane, top in TOPS.items():
        parts.append(text(LEFT - 12, top + LANE / 2 + 4, lane.upper(), anchor="end"))
        colours = COLOURS[lane]
        for what, _, start, end in record[lane]:
            parts.append(box(LEFT + start * scale, top, (end - start) * scale, LANE, colours[what][0]))
    parts += [*cpu_labels(record["cpu"], scale), *step_labels(record["gpu"], steps, scale), *axis(total, scale)]
    return "\n".join([*parts, *legend(record), "</svg>", ""])


def cpu_labels(spans: list[list[Any]], scale: float) -> list[str]:
    """Above the lane, which step is being launched, and below, which one's tokens are taken; as there is room."""
    parts = []
    for whats, words, y in ((ENTERING, "launch", TOPS["cpu"] - 8), (LEAVING, "tokens of", TOPS["cpu"] + LANE + 14)):
        free, before = 0.0, None
        for what, step, start, _ in spans:
            x = LEFT + start * scale
            if what in whats and step != before and x >= free:
                said = f"{words} {step_name(step)}"
                parts.append(text(x, y, said, small=True))
                free, before = x + 7 * len(said), step
    return parts


def step_labels(spans: list[list[Any]], steps: list[int], scale: float) -> list[str]:
    """Below the lane: where a step begins and ends."""
    parts, y = [], TOPS["gpu"] + LANE + 6
    for step in steps:
        own = [span for span in spans if span[1] == step]
        begin, end = min(span[2] for span in own), max(span[3] for span in own)
        left, right = LEFT + begin * scale, LEFT + end * scale
        parts.append(f'<path d="M{left:.1f} {y - 4}V{y}H{right:.1f}V{y - 4}" fill="none" stroke="#555"/>')
        words = f"step {step_name(step)}: {(end - begin) / 1e3:.2f} ms"
        parts.append(text((left + right) / 2, y + 15, words, anchor="middle"))
    return parts


def axis(total: float, scale: float) -> list[str]:
    """Milliseconds, at most a dozen."""
    every = next(unit for unit in (0.1, 0.2, 0.5, *(2**power for power in range(20))) if total / 1e3 / unit <= 12)
    ticks = [place * every for place in range(math.floor(total / 1e3 / every) + 1)]
    return [text(LEFT + tick * 1e3 * scale, 244, f"{tick:g} ms", anchor="middle", small=True) for tick in ticks]


def legend(record: dict[str, Any]) -> list[str]:
    """The legend of the kinds in the record."""
    parts, x = [], float(LEFT)
    shown = {(lane, what) for lane in COLOURS for what, *_ in record[lane]}
    for colour, words in [
        entry for lane, colours in COLOURS.items() for what, entry in colours.items() if (lane, what) in shown
    ]:
        parts += [box(x, 264, 11, 11, colour), text(x + 16, 274, words, small=True)]
        x += 34 + 6.1 * len(words)
    return parts


def main(records: list[Path]) -> None:
    for record in records:
        record.with_suffix(".svg").write_text(drawn(json.loads(record.read_text())))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
