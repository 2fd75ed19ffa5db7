"""Naive models and a simulated engine for the picker's core."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treeline_epp.matching import GUARD_BYTES


@dataclass(frozen=True)
class Block:
    """One block as the model knows it: `text` is everything from the beginning of the prompt to the block's end."""

    parent: int | None
    text: bytes
    tokens: int


@dataclass
class NaiveTree:
    """What the tree should know, written to be obvious: each block with its whole text, each pod with its hashes."""

    blocks: dict[int, Block] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=dict)

    def store(
        self, parent: int | None, hashes: Sequence[int], pieces: Sequence[bytes], width: int, bit: int
    ) -> list[int]:
        before = []
        held = self.held.setdefault(bit, set())
        for block, piece in zip(hashes, pieces, strict=True):
            if block not in self.blocks:
                above = Block(None, b"", 0) if parent is None else self.blocks[parent]
                self.blocks[block] = Block(parent, above.text + piece, above.tokens + width)
            if block in held:
                before.append(block)
            held.add(block)
            parent = block
        return before

    def remove(self, hashes: Sequence[int], bit: int) -> int:
        unknown = 0
        held = self.held.setdefault(bit, set())
        for block in hashes:
            if block in held:
                held.remove(block)
            else:
                unknown += 1
        self._drop_unheld()
        return unknown

    def clear(self, bit: int) -> None:
        self.held[bit] = set()
        self._drop_unheld()

    def _drop_unheld(self) -> None:
        alive = set().union(*self.held.values())
        self.blocks = {block: known for block, known in self.blocks.items() if block in alive}

    def match(self, key: bytes, bit: int, spans: Sequence[bytes] = ()) -> int:
        """Tokens of `key` that the pod holds."""
        matched = max(_common(key, text) for text in [b"", *spans, *(b.text for b in self.blocks.values())])
        held = self.held.get(bit, set())
        good: dict[int, bool] = {}

        def counts(block: int | None) -> bool:
            if block is None:
                return True
            if block not in good:
                good[block] = False  # a cycle does not count
                known = self.blocks.get(block)
                good[block] = (
                    block in held
                    and known is not None
                    and key.startswith(known.text)
                    and len(known.text) <= matched - GUARD_BYTES
                    and counts(known.parent)
                )
            return good[block]

        return max((self.blocks[block].tokens for block in held if counts(block)), default=0)


def _common(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)
