"""Who holds what, how much memory it takes and which layout to choose, from a model's configuration alone."""

from __future__ import annotations

from dlm_bridge.plan.memory import MemoryPlan, StageMemory, memory_plan
from dlm_bridge.plan.model import PlannedModel, open_model
from dlm_bridge.plan.run import PlannedRun

__all__ = ["MemoryPlan", "PlannedModel", "PlannedRun", "StageMemory", "memory_plan", "open_model"]
