"""The scheduler and the managers that it is composed of."""

from treeline_runtime.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
