"""`treeline serve` with the fake scheduler: `python -m support.fake_serve --model …`."""

import sys

from treeline_runtime import launch
from treeline_runtime.serve import main

if __name__ == "__main__":
    launch.MODULES["scheduler"] = "support.fake_scheduler"
    sys.exit(main())
