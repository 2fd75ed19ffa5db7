"""`treeline serve` for the chaos tests: results are processed one step behind, as on a GPU, and more requests are
admitted than the cache can hold, so that some are retracted: `python -m support.chaos_serve …`."""

import dataclasses
import sys

from treeline_runtime import command

if __name__ == "__main__":
    parse_args = command.parse_args
    command.parse_args = lambda argv=None: dataclasses.replace(
        parse_args(argv), overlap_depth=1, schedule_conservativeness=0.1
    )
    sys.exit(command.main())
