"""Five fields of a JSON object about a page, each bound by a regular expression."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

PAGE, SHORT, LONG = 1000, 8, 24
WORDS, QUANTITY, LIST = "[A-Za-z ]{1,200}", "[-0-9A-Za-z. ]{1,200}", "[A-Za-z ]{1,60}(, [A-Za-z ]{1,60}){0,20}"
"""Words alone can follow each: the vocabulary of a model with random weights has nothing else."""


def make(data: Data, programs: int) -> Batch:
    short, long = data.tokens(SHORT), data.tokens(LONG)

    @function
    def extract(s: Any, page: str) -> None:
        s += "Extract what the page says about the city.\nPage begin." + page + "\nPage end.\n"
        s += '{\n  "name": "' + gen("name", max_tokens=short, regex=WORDS) + '",\n'
        s += '  "country": "' + gen("country", max_tokens=short, regex=WORDS) + '",\n'
        s += '  "latitude": "' + gen("latitude", max_tokens=short, regex=QUANTITY) + '",\n'
        s += '  "population": "' + gen("population", max_tokens=short, regex=QUANTITY) + '",\n'
        s += '  "landmarks": "' + gen("landmarks", max_tokens=long, regex=LIST) + '"\n}\n'

    return Batch(extract, [{"page": data.text(PAGE)} for _ in range(programs)])


WORKLOAD = Workload(
    "json_decode", "JSON decode", "5 fields by regular expression, of 8 to 24 tokens, about 1,000", make, programs=10
)
