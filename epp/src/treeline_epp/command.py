"""`treeline pick` on the command line. It reads its arguments before it loads the picker, which takes a second."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from treeline_wire.command_line import ended_at_once
from treeline_wire.logs import set_up

log = logging.getLogger("treeline_epp")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the picker until SIGTERM or SIGINT, or `explain`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["explain"]:
        from treeline_epp import explain_command

        return explain_command.main(argv[1:])
    with ended_at_once():
        from treeline_epp.options import options_of

        options = options_of(argv)
        from treeline_epp.main import StartError, run

    set_up(options.log_level, "treeline_epp", "treeline_kube", form=options.log_format)
    try:
        run(options)
    except StartError as error:
        log.error("%s", error)
        return 1
    return 0
