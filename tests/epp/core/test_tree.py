"""The byte radix tree against a naive model, with edges so short that everything splits and merges all the time."""

import random

import pytest
from support.epp_core import NaiveTree
from treeline_epp.matching import match, walk
from treeline_epp.tree import Tree


def tokens_of(tree: Tree, key: bytes, pods: int) -> dict[int, int]:
    """Pod's bit → matched tokens."""
    out = {}
    for level in match(tree, walk(tree.root(None), key), pods):
        for shift in range(pods.bit_length()):
            if level.pods >> shift & 1:
                assert 1 << shift not in out, "levels overlap"
                out[1 << shift] = level.tokens
    return out


class World:
    """Random prompts over a tiny alphabet, cut into blocks by several tokenizations, hashed along the chain."""

    def __init__(self, seed: int, max_edge: int, pods: int) -> None:
        self.rng = random.Random(seed)
        self.tree = Tree(max_edge)
        self.naive = NaiveTree()
        self.bits = [1 << i for i in range(pods)]
        self.known: list[tuple[int | None, list[int], list[bytes]]] = []

    def prompt(self) -> tuple[int | None, list[int], list[bytes]]:
        """A chain of (hashes, texts). The hash names the chain's text and cuts, as an engine's does."""
        rng = self.rng
        parent, hashes, pieces, name = None, [], [], b""
        if self.known and rng.random() < 0.7:
            _, old_hashes, old_pieces = rng.choice(self.known)
            keep = rng.randrange(len(old_hashes) + 1)
            hashes, pieces = old_hashes[:keep], old_pieces[:keep]
            name = b"|".join(pieces) + (b"|" if pieces else b"")
        for _ in range(rng.randrange(1, 12)):
            piece = bytes(rng.choices(b"ab", k=rng.randrange(0 if pieces else 1, 7)))
            name += piece + b"|"
            pieces = [*pieces, piece]
            hashes = [*hashes, hash_of(name)]
        return parent, hashes, pieces

    def store(self) -> None:
        rng = self.rng
        _, hashes, pieces = self.prompt()
        self.known.append((None, hashes, pieces))
        bit = rng.choice(self.bits)
        start = rng.randrange(len(hashes)) if rng.random() < 0.3 else 0
        parent = hashes[start - 1] if start else None
        if parent is not None and not {parent, hashes[start]} & self.naive.blocks.keys():
            with pytest.raises(KeyError):
                self.tree.store(
                    self.tree.root(None),
                    parent,
                    hashes[start:],
                    lambda i, j: pieces[start + i : start + j],
                    16,
                    bit,
                )
            return
        expected = self.naive.store(parent, hashes[start:], pieces[start:], 16, bit)
        got = self.tree.store(
            self.tree.root(None), parent, hashes[start:], lambda i, j: pieces[start + i : start + j], 16, bit
        )
        assert got == (len(hashes) - start, expected)

    def remove(self) -> None:
        rng = self.rng
        bit = rng.choice(self.bits)
        held = sorted(self.naive.held.get(bit, ()))
        if rng.random() < 0.5 and self.known:  # a leaf-first run, as engines evict
            _, hashes, _ = rng.choice(self.known)
            victims = hashes[rng.randrange(len(hashes)) :][::-1]
        else:
            victims = rng.sample(held, min(len(held), rng.randrange(1, 6)))
        victims = [*victims, 999] if rng.random() < 0.1 else victims
        assert self.tree.remove(victims, bit) == self.naive.remove(victims, bit)

    def clear(self) -> None:
        bit = self.rng.choice(self.bits)
        self.naive.clear(bit)
        self.tree.begin_sweep()
        while self.tree.sweep(bit, 3):
            pass

    def compare(self) -> None:
        assert self.tree.blocks.keys() == self.naive.blocks.keys()
        for bit in self.bits:
            assert self.tree.held_by(bit) == self.naive.held.get(bit, set())
        keys = [b"".join(pieces) for _, _, pieces in self.rng.sample(self.known, min(4, len(self.known)))]
        keys += [key + b"abababab" for key in keys] + [
            key[: self.rng.randrange(len(key) + 1)] for key in keys if key
        ]
        for key in keys:
            got = tokens_of(self.tree, key, sum(self.bits))
            for bit in self.bits:
                assert got.get(bit, 0) == self.naive.match(key, bit), (key, bit)


def hash_of(name: bytes) -> int:
    return random.Random(name).getrandbits(64)


@pytest.mark.parametrize("max_edge", [4, 7, 17, 64])
@pytest.mark.parametrize("seed", range(12))
def test_stress_against_the_naive_model(seed: int, max_edge: int) -> None:
    world = World(seed, max_edge, pods=3)
    for step in range(160):
        action = world.rng.choices([world.store, world.remove, world.clear], [6, 5, 0.3])[0]
        action()
        world.tree.check()
        if step % 8 == 7:
            world.compare()
    for bit in world.bits:
        world.tree.remove(sorted(world.naive.held.get(bit, ())), bit)
    world.tree.check()
    assert world.tree.node_count == 0
    assert world.tree.text_bytes == 0
