"""`python -m treeline_operator`: the operator without the other rooms."""

from __future__ import annotations

import sys

from treeline_operator.operate import main

sys.exit(main())
