"""The datasets by name."""

from treeline_bench.serving.datasets import multi_turn, random_lengths, shared_prefix, sharegpt
from treeline_bench.serving.datasets.base import Dataset

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (random_lengths.DATASET, sharegpt.DATASET, shared_prefix.DATASET, multi_turn.DATASET)
}
