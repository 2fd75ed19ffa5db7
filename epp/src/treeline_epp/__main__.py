"""`python -m treeline_epp`."""

import sys

from treeline_epp.main import main

sys.exit(main())
