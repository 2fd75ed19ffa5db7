"""The upper bound of any router's hits: one cache for all engines that never evicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Oracle:
    """Block arithmetic over token ids, in the order in which requests were sent.

    A prompt's hits are its whole blocks that begin any sequence told before. The last token of a prompt is always
    computed, for its logits, so a block that it completes is no hit: vLLM and SGLang do the same.
    """

    def __init__(self, block_tokens: int) -> None:
        self._width = block_tokens
        self._known: set[int] = set()

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt would be cached if it were sent now."""
        found = 0
        for chain in self._chains(prompt[:-1]):
            if chain not in self._known:
                break
            found += self._width
        return found

    def remember(self, tokens: Sequence[int]) -> None:
        """Add a prompt that was sent, or the same with its answer."""
        self._known.update(self._chains(tokens))

    def _chains(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield one key for each whole block and all before it."""
        chain = 0
        for end in range(self._width, len(tokens) + 1, self._width):
            chain = hash((chain, tuple(tokens[end - self._width : end])))
            yield chain
