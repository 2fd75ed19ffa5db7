import sys

from treeline_sim.command import main

sys.exit(main(sys.argv[1:], "python -m treeline_sim"))
