"""Asks a model the held-out questions, decodes greedily with transformers and prints a table of accuracies.

`python models/tiny/evaluate.py --model models/tiny [--count 200] [--json FILE]`. An answer counts when it equals the
expected one to the character; "ended" is the share that stopped by itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import torch
from corpus import Question
from transformers import AutoModelForCausalLM, AutoTokenizer

UNTESTED = frozenset({"unknown", "story"})
LONG_SYSTEMS = (2000, 8000, 16_000)
NO_WORDING = frozenset({"memory", "follow-up", "talk"})


class Row(NamedTuple):
    """One line of the table."""

    category: str
    split: str
    system: int
    asked: int
    correct: float
    ended: float
    misses: list[tuple[str, str, str]]


def _batches(questions: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    ordered = sorted(questions, key=lambda question: sum(len(message["content"]) for message in question.messages))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


class Examiner:
    """A loaded model that answers questions in batches."""

    def __init__(self, model: Path, device: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
        ).to(device)
        self.ends = set(self.model.generation_config.eos_token_id)

    def answers(self, questions: Sequence[Question]) -> list[tuple[str, bool]]:
        """For each question the greedy answer, and whether it ended by itself."""
        prompts = [
            self.tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
            for question in questions
        ]
        longest = max(len(self.tokenizer(question.answer).input_ids) for question in questions)
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(
            self.model.device
        )
        with torch.inference_mode():
            out = self.model.generate(
                **inputs, do_sample=False, temperature=None, top_p=None, max_new_tokens=longest + 16
            )
        new = out[:, inputs.input_ids.shape[1] :].tolist()
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [(text, bool(self.ends & set(ids))) for text, ids in zip(texts, new, strict=True)]

    def grade(self, category: str, split: corpus.Split, count: int, system: int) -> Row:
        """Ask `count` questions; `system` is the length of the system prompt in characters (0: none)."""
        questions = list(corpus.held_out_questions(1, category, split, count, system))
        size = max(4, min(256, 400_000 // (system + 400)))
        correct = ended = 0
        misses: list[tuple[str, str, str]] = []
        for batch in _batches(questions, size):
            for question, (answer, stopped) in zip(batch, self.answers(batch), strict=True):
                correct += answer == question.answer
                ended += stopped
                if answer != question.answer:
                    misses.append((question.messages[-1]["content"], question.answer, answer))
        return Row(category, split, system, count, correct / count, ended / count, misses)


def main() -> None:
    """Grade a model on held-out questions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--count", type=int, default=200, help="questions a row; a quarter of it after long system prompts"
    )
    parser.add_argument("--json", type=Path, help="also write all rows here, wrong answers included")
    parser.add_argument("--misses", type=int, default=0, help="print so many wrong answers a row")
    arguments = parser.parse_args()
    examiner = Examiner(arguments.model, arguments.device)
    categories = [name for name in corpus.CATEGORIES if name not in UNTESTED]
    plan: list[tuple[str, corpus.Split, int, int]] = [(name, "test", arguments.count, 0) for name in categories]
    plan += [(name, "wording", arguments.count, 0) for name in categories if name not in NO_WORDING]
    plan += [
        (name, "test", max(1, arguments.count // 4), length)
        for length in LONG_SYSTEMS
        for name in (*categories, "recall")
    ]
    rows = []
    print(
        "| category | held out | system prompt (characters) | questions | correct | ended |\n|---|---|---|---|---|---|"
    )
    for category, split, count, system in plan:
        row = examiner.grade(category, split, count, system)
        rows.append(row)
        held_out = "combination" if split == "test" else "wording"
        print(
            f"| {category} | {held_out} | {system} | {count} | {row.correct:.1%} | {row.ended:.1%} |",
            flush=True,
        )
        for miss in row.misses[: arguments.misses]:
            print("   ", *(repr(part[-300:]) for part in miss), flush=True)
    for system in (0, *LONG_SYSTEMS):
        shares = [
            row.correct for row in rows if row.system == system and row.split == "test" and row.category != "recall"
        ]
        print(f"mean over categories, system prompt of {system} characters: {sum(shares) / len(shares):.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
