import random
import statistics

import pytest
from treeline_bench.stats import percentile


def test_between_two_values_it_interpolates() -> None:
    assert percentile([10, 20], 50) == 15
    assert percentile([4, 1, 3, 2], 25) == 1.75


def test_percentiles_agree_with_the_standard_library() -> None:
    rng = random.Random(1)
    values = [rng.expovariate(1) for _ in range(997)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for q in (1, 50, 90, 99):
        assert percentile(values, q) == pytest.approx(cuts[q - 1])


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1], -1), ([1], 101)])
def test_an_impossible_percentile_is_an_error(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match=r"percentile"):
        percentile(values, q)
