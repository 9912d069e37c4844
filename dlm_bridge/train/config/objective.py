"""The options of the objective: noise, weights and divisor of the loss, block schedule, auxiliary losses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from dlm_bridge.errors import SettingError
from dlm_bridge.settings import TRAINING, comma_separated, megatron_option, option


@dataclass(frozen=True)
class ObjectiveOptions:
    """What is minimised."""

    objective: str | None = option(
        None, "masked, shifted, block, uniform, uniform_hybrid, causal, ...; the model's own by default.",
        formerly="name", tasks=TRAINING, fixed=True, common=True,
    )  # fmt: skip
    length_variation: float = option(
        0.01, "Fraction of sequences truncated to a random length.", minimum=0, maximum=1, tasks=TRAINING, fixed=True,
        task_defaults={"sft": 0.0, "rl": 0.0},
    )  # fmt: skip
    loss_weighting: str | None = option(
        None, "Weight of a position: level (1/t), fraction (1/masked part), uniform, linear (1 - t), cart; of random "
        "tokens bound, clipped, dynamic; the objective's own.",
        choices=("level", "fraction", "uniform", "linear", "cart", "bound", "clipped", "dynamic"), tasks=TRAINING,
        fixed=True,
    )  # fmt: skip
    loss_normalisation: str | None = option(
        None, "Divisor of the loss: tokens, sequences (a mean over them) or predicted (tokens); the objective's own.",
        choices=("tokens", "sequences", "predicted"), tasks=TRAINING, fixed=True,
    )  # fmt: skip
    noise_range: str | None = option(
        None, "LOW,HIGH: masking probabilities are uniform between them, not between 0 and 1.", tasks=TRAINING,
        fixed=True,
    )  # fmt: skip
    p_uniform: float | None = option(
        None, "Fraction of random tokens at noise level 1/2, of objective uniform_hybrid.", above=0, below=1,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    edit_probability: float | None = option(
        None, "Fraction of visible tokens replaced by random ones, of objective block_editing.", minimum=0, maximum=1,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    indel_probability: float | None = option(
        None, "Fraction of tokens missing in a draft, or one too many, of objective block_editing; 0.", minimum=0,
        maximum=1, tasks=TRAINING, fixed=True,
    )  # fmt: skip
    max_deletions: int | None = option(
        None, "Masks to delete behind a masked span are fewer than this, of objective dreamon; 64.", minimum=1,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    merge_probability: float | None = option(
        None, "Probability that neighbouring masks become one that expands, of objective dreamon; 0.5.", minimum=0,
        maximum=1, tasks=TRAINING, fixed=True,
    )  # fmt: skip
    auto_balance: bool = option(
        False, "The clean stream's loss as large as the noisy one's, in place of 0.2 of it, of objective idlm.",
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    trajectory_steps: int | None = option(
        None, "Steps of a trajectory whose tokens have a loss, of objective trajectory; drawn otherwise.", minimum=1,
        tasks=("sft",), fixed=True,
    )  # fmt: skip
    trajectory_block: int | None = option(
        None, "Answer tokens of a block: every mask of the first open one has a loss (d3LLM).", minimum=1,
        tasks=("sft",), fixed=True,
    )  # fmt: skip
    trajectory_complement: float | None = option(
        None, "Probability that a state of a trajectory is replaced by its complement; 0 by default.", minimum=0,
        maximum=1, tasks=("sft",), fixed=True,
    )  # fmt: skip
    certainty_weight: float = option(
        0.0, "Weight of the entropy of right predictions (certainty-forcing), 0: none.", minimum=0, tasks=TRAINING,
        fixed=True,
    )  # fmt: skip
    certainty_temperature: float = option(
        1.0, "Temperature of the prediction whose entropy that is.", above=0, tasks=TRAINING, fixed=True,
        needs=("certainty_weight", None),
    )  # fmt: skip
    z_loss_coeff: float = option(
        0.0,
        "Weight of the z-loss, the mean of squared log-sum-exps of the logits, 0: none.",
        minimum=0,
        tasks=TRAINING,
    )
    mask_annealing_steps: int = option(
        0, "Steps from causal to bidirectional attention.", minimum=0, tasks=TRAINING, fixed=True
    )
    block_schedule: str | None = option(
        None, "step:block size pairs, growing, such as 0:4,1000:8,2000:32.", tasks=TRAINING, fixed=True
    )
    moe_aux_loss: str = megatron_option(
        "seq_aux_loss", "Load balancing loss: aux_loss, seq_aux_loss, global_aux_loss.",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss"), tasks=TRAINING,
    )  # fmt: skip
    moe_aux_loss_coeff: float = megatron_option(
        0.0, "Weight of the load balancing loss, 0: none.", minimum=0, tasks=TRAINING
    )
    moe_z_loss_coeff: float = megatron_option(
        0.0, "Weight of the router's z-loss, 0: none.", minimum=0, tasks=TRAINING
    )
    moe_expert_bias_update_rate: float = megatron_option(
        0.0, "Update rate of routers' expert bias, 0: constant.", minimum=0, tasks=TRAINING
    )
    mtp_loss_scaling_factor: float = megatron_option(
        0.1, "Weight of the multi-token prediction loss, 0: those layers stay as they are.", minimum=0,
        tasks=TRAINING, task_defaults={"rl": 0.0},
    )  # fmt: skip

    @cached_property
    def noise_levels(self) -> tuple[float, float] | None:
        """`noise_range` as numbers, None without one. Raises SettingError."""
        if self.noise_range is None:
            return None
        try:
            low, high = map(float, comma_separated(self.noise_range))
        except ValueError:
            raise SettingError("noise_range", f"{self.noise_range!r} must be two numbers such as 0.3,0.8") from None
        if not 0 <= low <= high <= 1 or high == 0:
            raise SettingError("noise_range", f"{self.noise_range!r} must be within 0,1, the lower number first")
        return low, high

    @cached_property
    def block_sizes(self) -> tuple[tuple[int, int], ...]:
        """(first step, block size) pairs of `block_schedule`, in order; empty without one. Raises SettingError."""
        if self.block_schedule is None:
            return ()
        try:
            pairs = [
                (int(step), int(size)) for step, size in (part.split(":") for part in self.block_schedule.split(","))
            ]
        except ValueError:
            raise self._schedule_error("must be step:size pairs such as 0:4,1000:8,2000:32") from None
        if pairs[0][0] != 0:
            raise self._schedule_error(f"must begin with step 0, not {pairs[0][0]}")
        if pairs[0][1] < 1:
            raise self._schedule_error(f"has block size {pairs[0][1]}")
        for (step, size), (later, larger) in itertools.pairwise(pairs):
            if later <= step or larger <= size:
                raise self._schedule_error(f"must grow in steps and sizes: {step}:{size} is before {later}:{larger}")
        return tuple(pairs)

    def _schedule_error(self, message: str) -> SettingError:
        return SettingError("block_schedule", f"{self.block_schedule!r} {message}")
