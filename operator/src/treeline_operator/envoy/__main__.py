"""``python -m treeline_operator.envoy``: run Envoy as the first process of a pod."""

import sys

from treeline_operator.envoy.edge import main

sys.exit(main())
