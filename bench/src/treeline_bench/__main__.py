"""`python -m treeline_bench`."""

import sys

from treeline_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
