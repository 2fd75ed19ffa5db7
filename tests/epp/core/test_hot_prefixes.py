"""The hottest prefixes are what a count of all beginnings says they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.console.view import Prefix, hot_prefixes, shared_bytes

KEYS = st.lists(st.text("ab", max_size=6).map(str.encode), max_size=12)


def walk(prefixes: list[Prefix], start: int = 0) -> Iterator[Prefix]:
    for prefix in prefixes:
        assert prefix.start == start
        yield prefix
        yield from walk(prefix.children, prefix.end)


def branches(keys: list[bytes]) -> dict[bytes, int]:
    """Beginnings that two keys or more share and none longer is shared by as many: what a tree's nodes are."""
    counts = Counter(key[:end] for key in keys for end in range(1, len(key) + 1))
    return {
        begun: count
        for begun, count in counts.items()
        if count > 1 and not any(counts[begun + bytes([letter])] == count for letter in b"ab")
    }


@given(KEYS)
def test_every_shared_beginning_is_found_once_with_its_count(keys: list[bytes]):
    found = list(walk(hot_prefixes(keys, 1000)))
    assert {one.key[: one.end]: one.count for one in found} == branches(keys)
    assert len(found) == len(branches(keys))


@given(KEYS, st.integers(0, 6))
def test_a_few_are_the_hottest_and_hang_together(keys: list[bytes], most: int):
    shown = [one.count for one in walk(hot_prefixes(keys, most))]
    assert sorted(shown, reverse=True) == sorted(branches(keys).values(), reverse=True)[:most]


@given(st.binary(max_size=5), st.binary(max_size=5), st.binary(max_size=5))
def test_what_two_keys_share(same: bytes, one: bytes, other: bytes):
    found = shared_bytes(same + one, same + other)
    assert (same + one)[:found] == (same + other)[:found]
    assert found in (len(same + one), len(same + other)) or (same + one)[found] != (same + other)[found]


@settings(deadline=None)
@given(st.integers(0, 3))
def test_a_thousand_turns_of_one_conversation_are_no_deep_recursion(extra: int):
    keys = [b"x" * length for length in range(1, 1001)] + [b"y"] * extra
    found = hot_prefixes(keys, 1)
    assert (found[0].count, found[0].end) == (1000, 1)
