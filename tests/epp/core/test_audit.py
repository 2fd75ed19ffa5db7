"""The audit: one error caps a hit; errors on unrelated prefixes rebuild the index, but not too often."""

import pytest
from treeline_epp.picking.endpoint import BACKOFF_S, TOLERANCE_BLOCKS, WINDOW_S, Audit, AuditResult

SLACK = TOLERANCE_BLOCKS * 16


def over(audit: Audit, prefix: int, now: float) -> AuditResult:
    return audit.observe(1000, 1000, 0, 16, prefix, now)


@pytest.mark.parametrize(
    ("confirmed", "found", "result"),
    [
        (1000, 1000 - SLACK, AuditResult.AGREED),
        (1000, 1000 + SLACK, AuditResult.AGREED),
        (1000, 1000 - SLACK - 1, AuditResult.CAP_HIT),
        (100, 96, AuditResult.AGREED),
    ],
    ids=["two blocks less", "two blocks more", "less than was confirmed", "a prediction is not held against events"],
)
def test_an_answer_is_judged_by_the_confirmed_blocks(confirmed: int, found: int, result: AuditResult) -> None:
    audit = Audit()
    assert audit.observe(confirmed, 1000, found, 16, 1, 0.0) is result


def test_errors_on_one_prefix_never_rebuild() -> None:
    audit = Audit()
    assert {over(audit, 1, at / 10) for at in range(50)} == {AuditResult.CAP_HIT}


def test_errors_on_unrelated_prefixes_rebuild_with_growing_pauses() -> None:
    audit = Audit()
    verdicts = [over(audit, at, at / 10) for at in range(3)]
    assert verdicts == [AuditResult.CAP_HIT, AuditResult.CAP_HIT, AuditResult.REBUILD]
    again = [now for at in range(1000) if over(audit, at, now := 1 + at / 10) is AuditResult.REBUILD]
    assert again[0] >= BACKOFF_S
    assert again[1] - again[0] >= 2 * BACKOFF_S


def test_errors_among_many_right_answers_do_not_rebuild() -> None:
    audit = Audit()
    for at in range(60):
        result = over(audit, at, at / 10) if at % 5 == 0 else audit.observe(64, 64, 64, 16, at, at / 10)
        assert result is not AuditResult.REBUILD


def test_old_errors_are_forgotten() -> None:
    audit = Audit()
    for at in range(10):
        assert over(audit, at, at * WINDOW_S) is AuditResult.CAP_HIT


def test_more_hits_than_predicted_are_errors_too() -> None:
    audit = Audit()
    verdicts = [audit.observe(0, 0, 500, 16, at, 0.0) for at in range(3)]
    assert verdicts == [AuditResult.AGREED, AuditResult.AGREED, AuditResult.REBUILD]
