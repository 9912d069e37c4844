"""A commit rule of the caller's, watched: what it must not do is said in its own name, not seen in the text."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.rules.base import CommitRule, Step


class Checked(CommitRule):
    """Asks `rule`, and raises DlmBridgeError where an answer is not what `CommitRule` promises."""

    def __init__(self, rule: Any) -> None:
        if not isinstance(rule, CommitRule):
            raise DlmBridgeError(
                f"commit_rule must be an object of a class below dlm_bridge.generation.CommitRule, not {rule!r}"
            )
        self._rule = rule
        self._name = type(rule).__name__
        self._steps: list[int] = []
        self.exact = rule.exact
        self.edits = rule.edits

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        quotas = self._rule.begin(masks, noise)
        if len(quotas) != len(masks):
            raise DlmBridgeError(f"{self._name}.begin has steps for {len(quotas)} rows, there are {len(masks)}")
        for count, steps in zip(masks, quotas, strict=True):
            if count and not steps:
                raise DlmBridgeError(f"{self._name}.begin announces no step for a row of {count} masks")
            if self.exact and sum(steps) != count:
                raise DlmBridgeError(
                    f"{self._name} is exact, but its steps settle {sum(steps)} positions of a row of {count} masks"
                )
        self._steps = [len(steps) for steps in quotas]
        return quotas

    def select(self, step: Step) -> torch.Tensor:
        picked_AN = self._rule.select(step)
        if picked_AN.dtype != torch.bool or picked_AN.shape != step.masked.shape:
            raise DlmBridgeError(
                f"{self._name}.select must give a boolean tensor of shape {tuple(step.masked.shape)}, not "
                f"{picked_AN.dtype} of {tuple(picked_AN.shape)}"
            )
        if not self.edits and (picked_AN & ~step.masked).any():
            raise DlmBridgeError(f"{self._name}.select picks a position that is settled: set its `edits` to True")
        counts = picked_AN.sum(dim=1).tolist()
        if self.exact and counts != step.quotas:
            raise DlmBridgeError(f"{self._name} is exact, but step {step.index} picks {counts}, not {step.quotas}")
        last = [self._steps[row] == step.index + 1 for row in step.rows]
        left = (step.masked & ~picked_AN).any(dim=1).tolist()
        if any(over and masked for over, masked in zip(last, left, strict=True)):
            raise DlmBridgeError(
                f"{self._name} leaves masks after its last step, {step.index}: announce more in begin"
            )
        return picked_AN

    def goes_on(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        more_A = self._rule.goes_on(step, unfinished_A)
        if (unfinished_A & ~more_A).any():
            raise DlmBridgeError(f"{self._name}.goes_on ends a row that has masks left")
        return more_A
