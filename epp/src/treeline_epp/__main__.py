"""`python -m treeline_epp`."""

import sys

from treeline_epp.command import main

sys.exit(main())
