"""`python -m treeline_operator.envoy`: run Envoy as the first process of a pod."""

from __future__ import annotations

import sys

from treeline_operator.envoy.launcher import main

sys.exit(main())
