"""The scheduler owns requests, pages and rows, and chooses the batch of each step."""

from treeline_runtime.scheduler.reports import Transport
from treeline_runtime.scheduler.scheduler import Scheduler
from treeline_runtime.scheduler.startup import start

__all__ = ["Scheduler", "Transport", "start"]
