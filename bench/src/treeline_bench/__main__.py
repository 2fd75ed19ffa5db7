"""`python -m treeline_bench`."""

import sys

from treeline_bench.cli import PROG, main

if __name__ == "__main__":
    sys.exit(main(prog=PROG))
