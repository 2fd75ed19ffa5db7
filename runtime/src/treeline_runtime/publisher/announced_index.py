"""The publisher's copy of the cache's contents, and what of it has been announced. No sockets.

The scheduler reports every cached page, but not all are worth announcing. Routers match prompts as *text*; a page with
sampled tokens may contain tokens that encoding its text would not give ("hel" + "lo" instead of "hello"), so no future
prompt can reach it. Three rules follow:

- A page with sampled tokens is announced only up to the first position that re-encoding does not reproduce.
- A page below an unannounced page is not announced either: no match could reach it.
- The removal of an unannounced page is silent.
- Tiers below the engine's own pool have copies: a page is announced there if it is announced in another tier.

Invariants (`check`): an announced page's parent is absent, or announced and in the same namespace; pages are the
cache's pages after every update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from treeline_wire.namespaces import adapter_of

from treeline_runtime.published import CacheEvent, Cleared, Copied, Medium, Removed, Stored

CUT_TOKENS = 3
"""A UTF-8 character has at most 4 bytes, so at most the last 3 tokens may contain an unfinished one."""
_NO_NAMES: Mapping[str, str] = {}
WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Page:
    """A cached page. `parent` None = it starts a sequence."""

    hash: int
    parent: int | None
    tokens: tuple[int, ...]
    namespace: str | None
    announced: bool


class AnnouncedIndex:
    """Pages by hash. `apply` is O(pages of the event), plus O(sequence) where sampled tokens must be re-encoded."""

    def __init__(self, reencoder: TokenizerReencoder) -> None:
        self._reencoder = reencoder
        self._pages: dict[int, Page] = {}
        self.names: dict[str, str] = {}
        """Digest of an adapter → its name."""
        self._below: dict[Medium, dict[int, Page]] = {"CPU": {}, "DISK": {}}
        """Announced pages of lower tiers, the faster one first."""

    def __len__(self) -> int:
        return len(self._pages)

    def pages(self) -> dict[Medium, dict[int, Page]]:
        """A copy by tier, O(pages), independent of later updates."""
        tiers: dict[Medium, dict[int, Page]] = {"GPU": self._pages, **self._below}
        return {medium: dict(pages) for medium, pages in tiers.items()}

    def announced(self) -> list[int]:
        return [page.hash for page in self._pages.values() if page.announced]

    def apply(self, events: Iterable[CacheEvent]) -> list[WireEvent]:
        """Applies a step's cache events; returns what to announce, in order."""
        told: list[WireEvent] = []
        for event in events:
            match event:
                case Stored():
                    told += self._store(event)
                case Copied():
                    told += self._copy(event)
                case Removed():
                    gone, last = self._remove(event), told[-1] if told else None
                    if gone and isinstance(last, BlockRemoved) and last.medium == event.medium:
                        gone = [*last.block_hashes, *gone]
                        told.pop()
                    if gone:
                        told.append(BlockRemoved(block_hashes=gone, medium=event.medium))
                case Cleared():
                    self._pages.clear()
                    for pages in self._below.values():
                        pages.clear()
                    told = [AllBlocksCleared()]
        return told

    def _store(self, event: Stored) -> list[WireEvent]:
        if not event.block_hashes:
            return []
        size = len(event.token_ids) // len(event.block_hashes)
        assert size * len(event.block_hashes) == len(event.token_ids), "a stored run holds whole pages"
        agreed = self._agreed_len(event)
        parent, fresh = event.parent_hash, list[Page]()
        reachable = parent is None or (parent in self._pages and self._pages[parent].announced)
        for index, block in enumerate(event.block_hashes):
            end = (index + 1) * size
            reachable = reachable and end <= agreed
            known = self._pages.get(block)
            if known is not None and known.announced:
                reachable = True
            else:
                tokens = tuple(event.token_ids[end - size : end])
                page = Page(block, parent, tokens, event.namespace, reachable)
                self._pages[block] = page
                if reachable:
                    fresh.append(page)
            parent = block
        return list(runs(fresh, names=self.names))

    def _copy(self, event: Copied) -> list[WireEvent]:
        tiers = [self._pages, *self._below.values()]
        there, fresh = self._below[event.medium], list[Page]()
        for block in event.block_hashes:
            page = next((pages[block] for pages in tiers if block in pages), None)
            if page is not None and page.announced and block not in there:
                there[block] = page
                fresh.append(page)
        return list(runs(fresh, event.medium, names=self.names))

    def _agreed_len(self, event: Stored) -> int:
        if event.output_from >= len(event.token_ids):
            return len(event.token_ids)
        before = self._tokens_down_to(event.parent_hash)
        agreed = self._reencoder.agreed_len([*before, *event.token_ids], len(before) + event.output_from)
        return agreed - len(before)

    def _tokens_down_to(self, block: int | None) -> list[int]:
        path: list[tuple[int, ...]] = []
        while block is not None and (page := self._pages.get(block)) is not None:
            path.append(page.tokens)
            block = page.parent
        return [token for tokens in reversed(path) for token in tokens]

    def _remove(self, event: Removed) -> list[int]:
        known = self._pages if event.medium == "GPU" else self._below[event.medium]
        pages = [known.pop(block, None) for block in event.block_hashes]
        return [page.hash for page in pages if page is not None and page.announced]

    def check(self) -> None:
        """Asserts the invariants above. O(pages)."""
        for block, page in self._pages.items():
            assert block == page.hash
            parent = self._pages.get(page.parent) if page.parent is not None else None
            if page.announced and parent is not None:
                assert parent.announced, f"{block} is announced below unannounced {parent.hash}"
                assert parent.namespace == page.namespace, f"{block} left its parent's namespace"
        for medium, pages in self._below.items():
            assert all(page.announced for page in pages.values()), f"unannounced pages of {medium}"


def parents_first(pages: dict[int, Page]) -> Iterator[Page]:
    """The announced ones of `pages`, parents first. O(pages), lazily."""
    done: set[int] = set()
    for page in pages.values():
        path: list[Page] = []
        step: Page | None = page
        while step is not None and step.hash not in done and step.announced:
            path.append(step)
            done.add(step.hash)
            step = pages.get(step.parent) if step.parent is not None else None
        yield from reversed(path)


def runs(
    pages: Iterable[Page], medium: Medium = "GPU", longest: int = 1024, names: Mapping[str, str] = _NO_NAMES
) -> Iterator[BlockStored]:
    """Pages of a tier → events: consecutive pages share an event of at most `longest` pages. names: of adapters."""
    run: list[Page] = []
    for page in pages:
        joins = run and page.parent == run[-1].hash and page.namespace == run[-1].namespace
        if run and (not joins or len(run) >= longest):
            yield _stored(run, names, medium)
            run = []
        run.append(page)
    if run:
        yield _stored(run, names, medium)


def _stored(run: list[Page], names: Mapping[str, str], medium: Medium) -> BlockStored:
    adapter = adapter_of(run[0].namespace)
    return BlockStored(
        block_hashes=[page.hash for page in run],
        parent_block_hash=run[0].parent,
        token_ids=[token for page in run for token in page.tokens],
        block_size=len(run[0].tokens),
        medium=medium,
        lora_name=None if adapter is None else names.get(adapter, adapter),
        cache_salt=run[0].namespace,
    )


class TokenizerReencoder:
    """Checks whether encoding a sequence's text gives its tokens back. Re-encodes from the last special token before
    the sampled ones: tokenizers split there first, so earlier text has no effect."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._splits = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)

    def agreed_len(self, ids: Sequence[int], sampled_from: int) -> int:
        """Number of leading `ids` that re-encoding reproduces, at least `sampled_from`: prompts are taken as given."""
        start = next((i for i in range(sampled_from - 1, -1, -1) if ids[i] in self._splits), 0)
        part = list(ids[start:])
        whole, text = self._finished(part)
        again = self._tokenizer.encode(text, add_special_tokens=False).ids
        pairs = zip(whole, again, strict=False)
        agreed = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(whole), len(again)))
        if agreed == len(whole):
            return len(ids)  # an unfinished character at the end is given the benefit of the doubt
        return max(start + agreed, sampled_from)

    def _finished(self, part: list[int]) -> tuple[list[int], str]:
        """`part` without the tokens of an unfinished character, and its text."""
        text = self._tokenizer.decode(part, skip_special_tokens=False)
        for cut in range(1, min(CUT_TOKENS, len(part) - 1) + 1):
            if not text.endswith("\ufffd"):
                break
            shorter = part[:-cut]
            text_of_shorter = self._tokenizer.decode(shorter, skip_special_tokens=False)
            if not text_of_shorter.endswith("\ufffd"):
                return shorter, text_of_shorter
        return part, text
