"""A node of the tree: an edge of text with the lanes and spans on it, and what hangs below."""

from treeline_epp.lane import Lane

#: A span of an edge: first byte, byte after the last, time at which it ends.
Span = tuple[int, int, float]

#: The children of every leaf: one dict, never written.
NO_CHILDREN: "dict[int, Node]" = {}


class Node:
    """An edge and what hangs below it. `spans`: pod's bit → span, None while there is none."""

    __slots__ = ("children", "lanes", "parent", "spans", "text")

    def __init__(self, text: bytes, parent: "Node | None") -> None:
        self.text = text
        self.parent = parent
        self.children = NO_CHILDREN
        self.lanes: tuple[Lane, ...] = ()
        self.spans: dict[int, Span] | None = None

    def adopt(self, child: "Node") -> None:
        """Put `child` below this node, in place of whichever child begins with the same byte. O(1)."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[child.text[0]] = child
        child.parent = self

    def disown(self, child: "Node") -> None:
        """Take `child` out. O(1)."""
        del self.children[child.text[0]]
        if not self.children:
            self.children = NO_CHILDREN
        child.parent = None

    def trim(self) -> None:
        """Forget holes at the ends of lanes, and lanes that are nothing but holes. O(lanes)."""
        for lane in self.lanes:
            lane.trim()
        if any(not lane.ends for lane in self.lanes):
            self.lanes = tuple(lane for lane in self.lanes if lane.ends)

    def held_bytes(self) -> int:
        """How much of the text a mark or a span needs. O(lanes + spans)."""
        held = max((lane.last_end() for lane in self.lanes), default=0)
        if self.spans:
            held = max(held, max(span[1] for span in self.spans.values()))
        return held


def join_spans(old: Span | None, new: Span) -> Span:
    """One span for two of the same pod: their union if they touch, else the one that ends later in time."""
    if old is None:
        return new
    if old[0] <= new[1] and new[0] <= old[1]:
        return min(old[0], new[0]), max(old[1], new[1]), max(old[2], new[2])
    return old if old[2] > new[2] else new
