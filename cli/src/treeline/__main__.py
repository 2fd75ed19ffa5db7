import sys

from treeline.main import main

sys.exit(main())
