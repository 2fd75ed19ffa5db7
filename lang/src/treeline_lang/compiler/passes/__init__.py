"""What is done to a graph before it is executed: functions from a graph to a graph, each with a report."""

from typing import Final

from treeline_lang.compiler.passes.base import Pass, Report
from treeline_lang.compiler.passes.code_movement import move_constants
from treeline_lang.compiler.passes.fork_hints import hint_forks
from treeline_lang.compiler.passes.precaching import precache
from treeline_lang.compiler.passes.sibling_batches import batch_siblings

DEFAULT_PASSES: Final[tuple[Pass, ...]] = (move_constants, hint_forks, batch_siblings, precache)

__all__ = ["DEFAULT_PASSES", "Pass", "Report", "batch_siblings", "hint_forks", "move_constants", "precache"]
