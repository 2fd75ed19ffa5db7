"""The byte radix tree against a naive model, with edges so short that everything splits and merges all the time."""

import random

import pytest
from support.epp_core import NaiveTree
from treeline_epp.index.matching import Level, Unite, match, uniting, walk
from treeline_epp.index.node import KEY_MASK
from treeline_epp.index.predictions import Predictions
from treeline_epp.index.radix_tree import RadixTree


def tokens_of(tree: RadixTree, key: bytes, pods: int, unite: Unite | None = None) -> dict[int, int]:
    """Return the matched tokens by pod's bit."""
    out = {}
    for level in match(tree, walk(tree.root(None), key), pods, unite):
        for shift in range(pods.bit_length()):
            if level.pods >> shift & 1:
                assert 1 << shift not in out, "levels overlap"
                out[1 << shift] = level.tokens
    return out


class Chain:
    """A prompt as some engine cuts it: hashes and texts of its blocks, and tokens per block."""

    def __init__(self, hashes: list[int], pieces: list[bytes], width: int) -> None:
        self.hashes = hashes
        self.pieces = pieces
        self.width = width


class World:
    """Random prompts over a tiny alphabet, cut into blocks in several ways, hashed along the chain."""

    def __init__(self, seed: int, max_edge: int, pods: int) -> None:
        self.rng = random.Random(seed)
        self.tree = RadixTree(max_edge)
        self.naive = NaiveTree()
        self.bits = [1 << i for i in range(pods)]
        self.known: list[Chain] = []
        self.hits = self.missed = 0

    def chain(self) -> Chain:
        """Return a new chain, or one that branches off another. A hash names its chain's text and cuts."""
        rng = self.rng
        hashes: list[int] = []
        pieces: list[bytes] = []
        width = rng.choice([16, 16, 16, 4])
        if self.known and rng.random() < 0.7:
            old = rng.choice(self.known)
            keep = rng.randrange(len(old.hashes) + 1)
            hashes, pieces, width = old.hashes[:keep], old.pieces[:keep], old.width
        for _ in range(rng.randrange(1, 12)):
            pieces = [*pieces, bytes(rng.choices(b"ab", k=rng.randrange(0 if pieces else 1, 7)))]
            hashes = [*hashes, hash_of(b"%d|" % width + b"|".join(pieces))]
        return Chain(hashes, pieces, width)

    def store(self) -> None:
        rng = self.rng
        chain = self.chain()
        self.known.append(chain)
        bit = rng.choice(self.bits)
        start = rng.randrange(len(chain.hashes)) if rng.random() < 0.3 else 0
        parent = chain.hashes[start - 1] if start else None
        hashes, pieces = chain.hashes[start:], chain.pieces[start:]
        root = self.tree.root(None)
        if parent is not None and not {parent, hashes[0]} & self.naive.blocks.keys():
            with pytest.raises(KeyError):
                self.tree.store(root, parent, hashes, lambda i, j: pieces[i:j], chain.width, bit)
            return
        expected = self.naive.store(parent, hashes, pieces, chain.width, bit)
        got = self.tree.store(root, parent, hashes, lambda i, j: pieces[i:j], chain.width, bit)
        assert got == (len(hashes), expected)

    def remove(self) -> None:
        rng = self.rng
        bit = rng.choice(self.bits)
        held = sorted(self.naive.held.get(bit, ()))
        if rng.random() < 0.5 and self.known:  # a run, leaves first or not, as engines evict
            hashes = rng.choice(self.known).hashes
            victims = hashes[rng.randrange(len(hashes)) :][:: rng.choice([1, -1])]
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
        assert self.tree.blocks.keys() == {block & KEY_MASK for block in self.naive.blocks}
        for bit in self.bits:
            assert self.tree.held_by(bit) == self.naive.held.get(bit, set())
        chains = self.rng.sample(self.known, min(4, len(self.known)))
        keys = [b"".join(chain.pieces) for chain in chains]
        keys += [key + b"abababab" for key in keys] + [key[: self.rng.randrange(len(key) + 1)] for key in keys if key]
        for key in keys:
            got = tokens_of(self.tree, key, sum(self.bits))
            first, second, *_ = self.bits
            expected = self.naive.match(key, [*([bit] for bit in self.bits), [first, second]])
            for bit, bounds in zip(self.bits, expected, strict=False):
                self.compare_match(got.get(bit, 0), bounds)
            united = tokens_of(self.tree, key, sum(self.bits), uniting([first | second]))
            assert united[first] == united[second]
            self.compare_match(united[first], expected[-1])

    def compare_match(self, got: int, expected: tuple[int, int]) -> None:
        """Check that a match has at most the proved tokens; it has fewer only if the proof lies beyond what a match
        looks at."""
        at_least, at_most = expected
        assert got <= at_most
        self.hits += at_least > 0
        self.missed += got < at_least


def hash_of(name: bytes) -> int:
    return random.Random(name).getrandbits(64)


@pytest.mark.parametrize("max_edge", [7])
@pytest.mark.parametrize("seed", range(8))
def test_a_sweep_reaches_everything_while_the_tree_changes(seed: int, max_edge: int) -> None:
    world = World(seed, max_edge, pods=3)
    rng, tree, (swept, *others) = world.rng, world.tree, world.bits

    def change(bits: list[int]) -> None:
        chain, bit = world.chain(), rng.choice(bits)
        world.known.append(chain)
        tree.store(tree.root(None), None, chain.hashes, lambda i, j: chain.pieces[i:j], chain.width, bit)
        tree.remove(rng.choice(world.known).hashes[::-1], rng.choice(bits))
        tree.check()

    for _ in range(6):
        for _ in range(6):
            change(world.bits)
        tree.begin_sweep()
        while tree.sweep(swept, rng.randrange(8, 20)):
            change(others)
        assert not tree.held_by(swept)
        tree.check()


@pytest.mark.parametrize("max_edge", [4, 7, 17, 64])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 8))])
def test_stress_against_the_naive_model(seed: int, max_edge: int) -> None:
    world = World(seed, max_edge, pods=3)
    for step in range(160):
        action = world.rng.choices([world.store, world.remove, world.clear], [6, 5, 0.3])[0]
        action()
        world.tree.check()
        if step % 8 == 7:
            world.compare()
    assert world.missed <= 0.1 * world.hits
    for bit in world.bits:
        world.tree.remove(sorted(world.naive.held.get(bit, ())), bit)
    world.tree.check()
    assert len(world.tree.nodes) == 0
    assert world.tree.text_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_contradicting_publishers_cannot_break_the_tree(seed: int) -> None:
    """Hashes that mean different things to different pods: the first one wins, and every invariant holds."""
    rng = random.Random(seed)
    tree = RadixTree(rng.choice([3, 8, 64]))
    held: dict[int, set[int]] = {1: set(), 2: set()}
    for _ in range(300):
        bit = rng.choice([1, 2])
        hashes = rng.sample(range(12), rng.randrange(1, 6))
        if rng.random() < 0.6:
            parent = rng.choice([None, *(h for h in tree.blocks if h not in hashes)])
            pieces = [bytes(rng.choices(b"ab", k=rng.randrange(4))) for _ in hashes]
            stored, _ = tree.store(
                tree.root(rng.choice([None, "salt"])), parent, hashes, lambda i, j, p=pieces: p[i:j], 4, bit
            )
            held[bit].update(hashes[:stored])
        else:
            unknown = tree.remove(hashes, bit)
            assert unknown == len(set(hashes) - held[bit])
            held[bit].difference_update(hashes)
        tree.check()
        assert tree.held_by(1) == held[1]
        assert tree.held_by(2) == held[2]
        walked = walk(tree.root(None), bytes(rng.choices(b"ab", k=20)))
        assert sum(level.pods for level in match(tree, walked, 3)) == 3
    tree.prune_roots()
    assert len(tree.roots) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_hashes_that_differ_in_their_high_bits_only_cannot_break_the_tree(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(rng.choice([3, 8, 64]))
    held: dict[int, set[int]] = {1: set(), 2: set()}
    for _ in range(300):
        bit = rng.choice([1, 2])
        hashes = [low | rng.randrange(3) << 60 for low in rng.sample(range(9), rng.randrange(1, 6))]
        if rng.random() < 0.6:
            held_by_some = [
                block for block in held[1] | held[2] if block & KEY_MASK not in {h & KEY_MASK for h in hashes}
            ]
            parent = rng.choice([None, *held_by_some])
            if parent is not None and tree.run_of(parent) is None and tree.run_of(hashes[0]) is None:
                continue
            pieces = [bytes(rng.choices(b"ab", k=rng.randrange(4))) for _ in hashes]
            tree.store(tree.root(None), parent, hashes, lambda i, j, p=pieces: p[i:j], 4, bit)
            held[bit].update(hashes)
        else:
            tree.remove(hashes, bit)
            held[bit].difference_update(hashes)
        tree.check()
        assert tree.held_by(1) <= held[1]
        assert tree.held_by(2) <= held[2]
    tree.remove(sorted(held[1]), 1)
    tree.remove(sorted(held[2]), 2)
    assert tree.blocks == {}


def test_the_worked_example_of_the_implementation_page() -> None:
    tree = RadixTree(max_edge=16)
    root = tree.root(None)
    texts = [b"You are ", b"a helpful ", b"bot.\nQ: "]
    tree.store(root, None, [11, 12, 13], lambda i, j: texts[i:j], 4, 1)

    def picture() -> dict[bytes, list[tuple[int, tuple[int, ...], int, list[tuple[int, int, int]]]]]:
        return {
            node.text: [(run.base, run.hashes(), run.last_end(), run.segments()) for run in node.runs]
            for node in tree.nodes
        }

    assert picture() == {
        b"You are a helpfu": [(0, (11,), 8, [(0, 1, 1)])],
        b"l bot.\nQ: ": [(4, (12, 13), 10, [(0, 2, 1)])],
    }
    tree.store(root, None, [11, 12, 24], lambda i, j: [*texts[:2], b"cat.\nQ: "][i:j], 4, 2)
    assert picture() == {
        b"You are a helpfu": [(0, (11,), 8, [(0, 1, 3)])],
        b"l ": [(4, (12,), 2, [(0, 1, 3)])],
        b"bot.\nQ: ": [(8, (13,), 8, [(0, 1, 1)])],
        b"cat.\nQ: ": [(8, (24,), 8, [(0, 1, 2)])],
    }
    request = b"You are a helpful bot.\nQ: Why not a cat?"
    assert match(tree, walk(root, request), 3) == [Level(3, 8, 18)]
    predictions = Predictions()
    predictions.predict(tree, root, request, 18, 1, now=0.0, life=1.0, budget=1000)
    assert match(tree, walk(root, request), 3) == [Level(1, 8, 18, 26), Level(2, 8, 18)], "a prediction proves no cut"
    predictions.expire(tree, now=1.0)
    why = [b"Why not a ", b"cat?"]
    tree.store(root, 13, [14, 15], lambda i, j: why[i:j], 4, 4)
    assert match(tree, walk(root, request), 3) == [Level(1, 12, 26), Level(2, 8, 18)], "another pod's blocks do"
    tree.remove([14, 15], 4)
    tree.remove([13], 1)
    assert picture() == {
        b"You are a helpfu": [(0, (11,), 8, [(0, 1, 3)])],
        b"l cat.\nQ: ": [(4, (12, 24), 10, [(0, 1, 3), (1, 2, 2)])],
    }
    tree.check()
