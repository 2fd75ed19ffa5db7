"""Records a server's requests and answers as sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from treeline_lang import RuntimeEndpoint
from treeline_lang.backends.http import HttpClient

from treeline_bench.context import BenchmarkError
from treeline_bench.programs.oracle import Found, Tree


@dataclass(frozen=True)
class Asked:
    """A prompt, as text or ids, and its answer."""

    prompt: str | list[int]
    answer: list[int]
    prompt_tokens: int
    cached_tokens: int


class Recording(HttpClient):
    """Records requests to `/generate`, hints included, in the order of answers: a request comes after the one it
    continues."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answered: list[tuple[dict[str, Any], Any]] = []

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        answer = await super().post(path, body, headers)
        if path == "/generate":
            self.answered.append((body, answer))
        return answer


class Recorded(RuntimeEndpoint):
    """A recording backend."""

    def __init__(self, url: str) -> None:
        # Texts are sent without a chat template, since a model with random weights has none.
        super().__init__(url, chat_template="plain")
        self._http = self._recording = Recording(url)

    def take(self) -> list[Asked]:
        """Returns the requests recorded since the last call."""
        answered, self._recording.answered = self._recording.answered, []
        return [asked for body, answer in answered for asked in asked_of(body, answer)]


def asked_of(body: dict[str, Any], answers: Any) -> list[Asked]:
    """From a body of `/generate` and its answer, a list for several prompts."""
    prompts = body["text"] if "text" in body else body["input_ids"]
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    answers = answers if isinstance(answers, list) else [answers]
    copies = len(answers) // max(len(prompts), 1)  # n of each
    return [
        Asked(prompt, answer["output_ids"], answer["meta_info"]["prompt_tokens"], answer["meta_info"]["cached_tokens"])
        for prompt, answer in zip([prompt for prompt in prompts for _ in range(copies)], answers, strict=True)
    ]


def hits(asked: Sequence[Asked]) -> Found:
    """Counts the server's hits, without the optimum."""
    return Found(sum(one.prompt_tokens for one in asked), sum(one.cached_tokens for one in asked))


def compare(asked: Sequence[Asked], tokenizer: Tokenizer) -> Found:
    """Counts the server's hits and the best cache's. Raises BenchmarkError if server and tokenizer count different
    tokens."""
    tree, found = Tree(), hits(asked)
    for one, ids in zip(asked, _ids(asked, tokenizer), strict=True):
        if len(ids) != one.prompt_tokens:
            raise BenchmarkError(f"the server counts {one.prompt_tokens} tokens of a prompt, its tokenizer {len(ids)}")
        found.best += tree.add(ids)
        tree.add(ids + one.answer[:-1])  # the last one is sampled, and never computed
    return found


def _ids(asked: Sequence[Asked], tokenizer: Tokenizer) -> list[list[int]]:
    texts = iter(tokenizer.encode_batch([one.prompt for one in asked if isinstance(one.prompt, str)]))
    return [next(texts).ids if isinstance(one.prompt, str) else one.prompt for one in asked]
