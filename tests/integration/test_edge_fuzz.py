"""A short attack on the whole path; `make fuzz-edge` attacks for longer, and compares latencies, too."""

import random
from pathlib import Path

import pytest
from support.stack import running_stack

from .edge_fuzz import answers
from .edge_fuzz.attacks import attack
from .edge_fuzz.run import run

pytestmark = pytest.mark.deep


def test_attacks_get_no_5xx_leave_nothing_behind_and_do_not_touch_another_client(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        report = run(stack, seconds=6, rate=12, settle_s=3, hold_s=3)
    assert report.attacked.attacks == (3 + 6) * 12
    assert report.attacked.statuses[200] > 10, "some of it is served"
    assert report.attacked.statuses[400] > 10, "some of it is refused"
    assert report.attacked.defects == []
    assert report.failures == []
    assert report.grown == []


def test_an_attack_is_made_again_from_its_number() -> None:
    for number in range(50):
        first, second = (attack(random.Random(f"1:{number}")) for _ in range(2))
        assert first == second


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"HTTP/1.1 200 OK\r\n\r\n", [(200, False)]),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n",
            [(100, False), (500, True)],
        ),
        (b'HTTP/1.1 503 X\r\n\r\n{"error": {"code": "overloaded"}}', [(503, False)]),
        (b"HTTP/1.1 501 Not Implemented\r\n\r\n", [(501, False)]),
        (b"HTTP/1.1 50", []),
    ],
)
def test_a_5xx_of_ours_is_distinguished_from_other_answers(data: bytes, expected: list[tuple[int, bool]]) -> None:
    assert [(answer.status, answer.is_defect) for answer in answers.read(data, http2=False)] == expected
