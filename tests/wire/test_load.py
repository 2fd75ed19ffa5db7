"""Load reports of both forms."""

from typing import Any

import msgspec
import pytest
from treeline_wire.events import DecodeError, DecodeReason
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, LoadStat, TreelineLoad, decode_load, encode

from .fuzz import GOLDEN

STAT = LoadStat(1, 2, 3, 4, 0, 5, 6, 7, 8, 9)
OURS = TreelineLoad(epoch=7, seq=1, running=2, pages_total=100, prefill_tokens_per_s=1e6, adapters=["a"], draining=True)
pack = msgspec.msgpack.encode


def test_sglangs_array_both_ways() -> None:
    assert decode_load(b"load", bytes.fromhex(GOLDEN["loadstat"])) == STAT
    assert encode(STAT).hex() == GOLDEN["loadstat"]


def test_ours_is_a_map_of_names() -> None:
    assert decode_load(TREELINE_LOAD_TOPIC, encode(OURS)) == OURS
    assert set(msgspec.msgpack.decode(encode(OURS))) == set(TreelineLoad.__struct_fields__)


@pytest.mark.parametrize("report", [STAT, OURS])
def test_the_payload_decides_an_unknown_topic(report: LoadStat | TreelineLoad) -> None:
    assert decode_load(b"configured", encode(report)) == report


def test_older_and_newer_senders() -> None:
    assert decode_load(LOAD_TOPIC, pack(["LoadStat", 1, 2])) == LoadStat(1, 2)
    assert decode_load(LOAD_TOPIC, pack(["LoadStat", *range(1, 11), "new"])).num_running == 1  # type: ignore[union-attr]
    assert decode_load(TREELINE_LOAD_TOPIC, pack({"epoch": 3, "new": [1]})) == TreelineLoad(epoch=3)


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        (LOAD_TOPIC, ["LoadStat", -1]),
        (LOAD_TOPIC, ["Other", 1]),
        (LOAD_TOPIC, {"epoch": 1}),
        (LOAD_TOPIC, 3),
        (TREELINE_LOAD_TOPIC, ["LoadStat", 1]),
        (TREELINE_LOAD_TOPIC, {"epoch": -1}),
        (TREELINE_LOAD_TOPIC, {"prefill_tokens_per_s": float("nan")}),
        (TREELINE_LOAD_TOPIC, {"decode_step_ms": float("inf")}),
        (TREELINE_LOAD_TOPIC, {"draining": 1}),
        (b"x", None),
    ],
)
def test_nonsense_is_one_typed_error(topic: bytes, value: Any) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_load(topic, pack(value))
    assert caught.value.reason is DecodeReason.BAD_LOAD


def test_reports_are_small() -> None:
    with pytest.raises(DecodeError) as caught:
        decode_load(LOAD_TOPIC, bytes(2 << 20))
    assert caught.value.reason is DecodeReason.TOO_LARGE
    with pytest.raises(DecodeError):
        decode_load(b"x", b"")
