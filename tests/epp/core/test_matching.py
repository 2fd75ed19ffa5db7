"""A match credits a pod only with tokens that its engine would find: against tokenizers, and a set of chains for each
pod."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.index.index import Index
from treeline_epp.index.limits import IndexLimits
from treeline_epp.index.pods import Pod
from treeline_wire.events import BlockRemoved, BlockStored, block_hash, hash_of
from treeline_wire.keys import PrefixKeys

pytestmark = pytest.mark.deep

SCOPE = "model"
Encode = Callable[[str], list[int]]


class Table:
    """Token id → bytes, the part of a tokenizer that the index needs."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.token_bytes = [token.encode() for token in tokens]


def longest_first(tokens: Sequence[str]) -> Encode:
    """Return an encoder that always cuts off the longest token that fits: a cut depends on no more text than one token
    has."""
    ids = {token: number for number, token in enumerate(tokens)}
    longest = max(map(len, tokens))

    def encode(text: str) -> list[int]:
        out, at = [], 0
        while at < len(text):
            size = next(size for size in range(longest, 0, -1) if text[at : at + size] in ids)
            out.append(ids[text[at : at + size]])
            at += size
        return out

    return encode


@dataclass
class Replicas:
    """An index beside the truth: for each pod the blocks that its engine holds, each named by all tokens up to its
    end."""

    encode: Encode
    keys: PrefixKeys
    width: int
    index: Index
    pods: list[Pod]
    held: list[set[tuple[int, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [set() for _ in self.pods]

    def chains(self, text: str) -> list[tuple[int, ...]]:
        tokens = self.encode(text)
        return [tuple(tokens[:end]) for end in range(self.width, len(tokens) + 1, self.width)]

    def compute(self, number: int, text: str) -> None:
        """Let the engine compute a prompt: it holds all whole blocks, and announces the new ones."""
        chains = self.chains(text)
        new = next((at for at, chain in enumerate(chains) if chain not in self.held[number]), len(chains))
        self.held[number].update(chains)
        if new < len(chains):
            hashes = [self.hash(chain) for chain in chains]
            tokens = list(chains[-1][new * self.width :])
            parent = hashes[new - 1] if new else None
            self.index.apply(self.pods[number], BlockStored(hashes[new:], parent, tokens, self.width), self.keys)

    def evict(self, number: int, text: str, keep: int) -> None:
        """Evict the prompt's blocks from its end on, as far as no other block depends on them."""
        gone = []
        for chain in reversed(self.chains(text)[keep:]):
            if chain in self.held[number]:
                below = len(chain) + self.width
                if any(len(other) == below and other[: len(chain)] == chain for other in self.held[number]):
                    break
                self.held[number].remove(chain)
                gone.append(self.hash(chain))
        if gone:
            self.index.apply(self.pods[number], BlockRemoved(gone), None)

    def predict(self, number: int, text: str) -> None:
        """Route the prompt to the pod."""
        hit = self.index.match(SCOPE, None, text.encode(), 0.0).hit(self.pods[number])
        self.index.predict(self.pods[number], None, text.encode(), hit, 0.0)

    def truth(self, number: int, text: str) -> int:
        """Return how many tokens the engine would find."""
        tokens = 0
        for chain in self.chains(text):
            if chain not in self.held[number]:
                break
            tokens = len(chain)
        return tokens

    def answers(self, text: str, now: float = 0.0) -> list[int]:
        match = self.index.match(SCOPE, None, text.encode(), now)
        return [match.hit(pod).tokens for pod in self.pods]

    def hash(self, chain: tuple[int, ...]) -> int:
        return hash_of(block_hash(b"", chain))


def replicas(encode: Encode, tokens: Sequence[str], pods: int, width: int, max_edge: int = 8192) -> Replicas:
    index = Index(IndexLimits(max_edge=max_edge))
    keys = cast(PrefixKeys, Table(tokens))
    return Replicas(encode, keys, width, index, [index.add_pod(f"pod-{n}", SCOPE) for n in range(pods)])


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[str], int, int, int, list[tuple[int, int, str, int]]]:
    """Draw tokens of at most eight bytes, block width, longest edge, pods, and actions."""
    piece = st.text("ab ", min_size=2, max_size=8)
    tokens = ["a", "b", " ", *draw(st.lists(piece, max_size=8, unique=True))]
    text = st.lists(st.sampled_from(tokens), min_size=1, max_size=16).map("".join)
    actions = st.tuples(st.integers(0, 2), st.integers(0, 2), text, st.integers(0, 4))
    return tokens, draw(st.integers(1, 3)), draw(st.sampled_from([3, 16, 64])), 3, draw(st.lists(actions, max_size=16))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(histories())
def test_a_match_credits_no_more_than_the_engine_would_find(
    history: tuple[list[str], int, int, int, list[tuple[int, int, str, int]]],
) -> None:
    """The credit is exact where a cut depends on no more text than GUARD_BYTES."""
    tokens, width, max_edge, pods, actions = history
    world = replicas(longest_first(tokens), tokens, pods, width, max_edge)
    texts = [text for _, _, text, _ in actions]
    for action, number, text, keep in actions:
        if action == 2:
            world.evict(number, text, keep)
        else:
            if action == 1:
                world.predict(number, text)
            world.compute(number, text)
        for asked in [text, *(other + text for other in texts[:3])]:
            for at, credited in enumerate(world.answers(asked)):
                assert credited <= world.truth(at, asked)
    world.index.check()


def words_of(rng: random.Random, count: int) -> list[str]:
    """Return words of which many share a beginning, as in natural language: longer ones extend shorter ones."""
    words: list[str] = []
    for _ in range(count):
        stem = rng.choice(words)[:9] if words and rng.random() < 0.5 else ""
        words.append(stem + "".join(rng.choices("etaoinshrdlu", k=rng.randrange(1, 6))))
    return words


def byte_pairs(text: str) -> tuple[Encode, list[str]]:
    """Return a byte-level BPE like GPT's, trained on a text: a space belongs to the next word, merges cross it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text], trainer)
    vocabulary = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    return lambda prompt: tokenizer.encode(prompt).ids, vocabulary


def traffic(rng: random.Random, words: list[str], encode: Encode, tokens: Sequence[str], width: int) -> tuple[int, ...]:
    """Run conversations on twelve pods. Return counts: pairs of a request and a pod that holds part of it,
    over-credited pairs; tokens held, tokens credited, tokens over-credited."""
    world = replicas(encode, tokens, 12, width, max_edge=256)
    systems = [" ".join(rng.choices(words, k=rng.randrange(5, 60))) for _ in range(4)]
    talks: list[str] = []
    pairs = wrong = there = credited = excess = 0
    for _ in range(300):
        if talks and rng.random() < 0.7:
            talk = rng.choice(talks)
            talk = talk[: rng.randrange(len(talk))] if rng.random() < 0.3 else talk
        else:
            talk = rng.choice(systems)
        talk += rng.choice(["", " ", "\n", "s "]) + " ".join(rng.choices(words, k=rng.randrange(1, 12)))
        for number, tokens_found in enumerate(world.answers(talk)):
            truth = world.truth(number, talk)
            pairs += max(truth, tokens_found) > 0
            wrong += tokens_found > truth
            there += truth
            credited += tokens_found
            excess += max(0, tokens_found - truth)
        number = rng.randrange(len(world.pods))
        world.predict(number, talk)
        world.compute(number, talk)
        talks.append(talk)
        if rng.random() < 0.3:
            world.evict(rng.randrange(len(world.pods)), rng.choice(talks), rng.randrange(8))
    return pairs, wrong, there, credited, excess


def test_at_most_one_pod_in_a_thousand_is_over_credited() -> None:
    """Cuts of a real tokenizer may depend on more text than GUARD_BYTES: a word's merges look at all of it."""
    rng = random.Random(7)
    words = words_of(rng, 400)
    byte_pair = byte_pairs(" ".join(rng.choices(words, k=5000)))
    characters = sorted({*" \n", *"".join(words), "s"})
    pieces = [*characters, *(" " + word for word in words[::2]), *words[1::2]]
    greedy = (longest_first(pieces), pieces)
    totals = [0] * 5
    for width in (1, 4, 16):
        for encode, tokens in (byte_pair, greedy):
            found = traffic(rng, words, encode, tokens, width)
            totals = [a + b for a, b in zip(totals, found, strict=True)]
    pairs, wrong, there, credited, excess = totals
    assert pairs > 1000
    assert wrong <= 0.001 * pairs
    assert excess <= 0.001 * credited
    assert credited >= 0.94 * there
