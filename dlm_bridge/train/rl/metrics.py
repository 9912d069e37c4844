"""What the rows of metrics.jsonl say of reinforcement learning beside what they say of all training."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_bridge.train.metrics import Row


@dataclass(frozen=True, kw_only=True)
class RolloutRow(Row):
    """A step of sampled and judged completions."""

    reward: float  # mean
    reward_std: float  # over all of the step's completions
    rewards: dict[str, float]  # the mean of each function
    failed_rewards: int  # completions whose reward raised or hung and counted as 0
    idle_groups: float  # share of prompts whose completions all have the same reward: nothing is learned from them
    kl: float | None  # from the reference, in nats a token; null without one
    clip_fraction: float  # share of tokens that the clip kept from gaining
    completion_length: float  # tokens, the end included
    eval_reward: float | None = None  # of greedy answers to held-out prompts
    eval_rewards: dict[str, float] | None = None

    @property
    def was_evaluated(self) -> bool:
        return self.eval_reward is not None

    def shown(self) -> str:
        """The figures as a person reads them."""
        held_out = "" if self.eval_reward is None else f"  held-out {self.eval_reward:.3f}"
        return f"reward {self.reward:.3f}  length {self.completion_length:.1f}  {super().shown()}{held_out}"


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(Row):
    """A step of preferred rows."""

    preferred: float  # share of pairs whose chosen answer gained on the rejected one
    margin: float  # mean of beta x (gain of the chosen answer - gain of the rejected one)
    eval_preferred: float | None = None

    def shown(self) -> str:
        """The figures as a person reads them."""
        return f"preferred {self.preferred:.3f}  margin {self.margin:.3f}  {super().shown()}"
