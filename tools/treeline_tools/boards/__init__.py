"""The chart's dashboards, a module each."""

from __future__ import annotations

from typing import Final

from treeline_tools.boards import engines, gateway, operator, routing
from treeline_tools.boards.base import Board

BOARDS: Final[tuple[Board, ...]] = (gateway.BOARD, routing.BOARD, engines.BOARD, operator.BOARD)
