"""Planning from a model's config alone: parameters and memory per rank, step time, recommended layouts, dry run."""

from __future__ import annotations

from dlm_bridge.plan.memory import MemoryPlan, StageMemory, memory_plan
from dlm_bridge.plan.model import PlannedModel, open_model
from dlm_bridge.plan.run import PlannedRun

__all__ = ["MemoryPlan", "PlannedModel", "PlannedRun", "StageMemory", "memory_plan", "open_model"]
