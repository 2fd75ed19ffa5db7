import sys

from treeline_bench.serving.command import main

sys.exit(main(prog="python -m treeline_bench.serving"))
