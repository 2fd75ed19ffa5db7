import sys

from treeline_lang.command import main

sys.exit(main())
