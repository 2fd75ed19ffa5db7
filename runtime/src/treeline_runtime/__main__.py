"""`python -m treeline_runtime` is `treeline serve`."""

import sys

from treeline_runtime.command import main

sys.exit(main())
