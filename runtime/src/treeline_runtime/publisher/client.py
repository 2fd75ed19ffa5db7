"""The scheduler's end of the pipe to the publisher: never blocks, and starts over after an overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from treeline_runtime.published import CacheUpdate, Cleared, LoadUpdate, Stored

Block = tuple[int, int | None, list[int], str | None]
"""(hash, parent hash, tokens, namespace) of a cached page."""


class PublisherClient:
    """Sends updates while the publisher takes them.

    After one could not be sent, the publisher's index is wrong. So nothing is sent until there is room for the whole
    tree, which replaces it.
    """

    def __init__(
        self, send: Callable[[CacheUpdate | LoadUpdate], bool], whole_tree: Callable[[], Iterable[Block]]
    ) -> None:
        """`send` returns False when it dropped the message; `whole_tree` yields every cached page, parents first."""
        self._send = send
        self._whole_tree = whole_tree
        self._behind = False
        self.updates = 0

    def publish(self, update: CacheUpdate | LoadUpdate) -> None:
        caught_up_now = self._behind and self.catch_up()
        if self._behind or (caught_up_now and isinstance(update, CacheUpdate)):
            return  # the tree as it is contains the update
        if not self._send(update):
            self._behind = True
        elif isinstance(update, CacheUpdate):
            self.updates += 1

    def catch_up(self) -> bool:
        """Starts over if needed and possible; True if nothing is missing."""
        if self._behind and self._send(CacheUpdate([Cleared(), *stored_runs(self._whole_tree())])):
            self._behind = False
            self.updates += 1
        return not self._behind


def stored_runs(blocks: Iterable[Block]) -> Iterator[Stored]:
    """Pages, parents first → events of consecutive pages.

    Sampled tokens are no longer known, so all count as sampled.
    """
    run: Stored | None = None
    for block, parent, tokens, namespace in blocks:
        if run is not None and parent == run.block_hashes[-1] and namespace == run.namespace:
            run.block_hashes.append(block)
            run.token_ids.extend(tokens)
            continue
        if run is not None:
            yield run
        run = Stored([block], parent, list(tokens), namespace, output_from=0)
    if run is not None:
        yield run
