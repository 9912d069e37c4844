"""Options of the objective: noise, weights and divisor of the loss, block schedule, auxiliary losses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from dlm_bridge.errors import SettingError
from dlm_bridge.settings import TRAINING, comma_separated, megatron_option, option


@dataclass(frozen=True)
class ObjectiveOptions:
    """Training objective and its noise."""

    objective: str | None = option(
        None, "masked, shifted, block, uniform, uniform_hybrid, causal, ... Default: the model's.",
        formerly="name", tasks=TRAINING, fixed=True, common=True,
    )  # fmt: skip
    length_variation: float = option(
        0.01, "Fraction of sequences truncated to a random length.", minimum=0, maximum=1, tasks=TRAINING, fixed=True,
        task_defaults={"sft": 0.0, "rl": 0.0},
    )  # fmt: skip
    loss_weighting: str | None = option(
        None, "Weight of a position: level (1/t), fraction (1/masked fraction), uniform, linear (1 - t), cart; with "
        "random tokens bound, clipped, dynamic. Default: the objective's.",
        choices=("level", "fraction", "uniform", "linear", "cart", "bound", "clipped", "dynamic"), tasks=TRAINING,
        fixed=True,
    )  # fmt: skip
    loss_normalisation: str | None = option(
        None, "Divisor of the loss: tokens, sequences or predicted (tokens). Default: the objective's.",
        choices=("tokens", "sequences", "predicted"), tasks=TRAINING, fixed=True,
    )  # fmt: skip
    noise_range: str | None = option(
        None, "LOW,HIGH: range of the uniform masking probability. Default: 0,1.", tasks=TRAINING,
        fixed=True,
    )  # fmt: skip
    p_uniform: float | None = option(
        None, "Fraction of random tokens at noise level 1/2 (objective uniform_hybrid).", above=0, below=1,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    edit_probability: float | None = option(
        None, "Fraction of visible tokens replaced by random ones (objective block_editing).", minimum=0, maximum=1,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    indel_probability: float | None = option(
        None, "Fraction of tokens deleted from or inserted into a draft (objective block_editing).", minimum=0,
        maximum=1, tasks=TRAINING, fixed=True,
    )  # fmt: skip
    max_deletions: int | None = option(
        None, "Exclusive limit of masks to delete after a masked span (objective dreamon). Default: 64.", minimum=1,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    merge_probability: float | None = option(
        None, "Probability of merging adjacent masks into one that expands (objective dreamon). Default: 0.5.",
        minimum=0, maximum=1, tasks=TRAINING, fixed=True,
    )  # fmt: skip
    auto_balance: bool = option(
        False, "Scale the clean stream's loss to the noisy stream's, instead of by 0.2 (objective idlm).",
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    buffer_size: int | None = option(
        None, "Most blocks that the model denoises at once (objective multi_bd). Default: 4.", minimum=2,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    trajectory_steps: int | None = option(
        None, "Steps of a trajectory whose tokens have a loss (objective trajectory). Default: random.", minimum=1,
        tasks=("sft",), fixed=True,
    )  # fmt: skip
    trajectory_block: int | None = option(
        None, "Block size in answer tokens: every mask of the first open block has a loss (d3LLM).", minimum=1,
        tasks=("sft",), fixed=True,
    )  # fmt: skip
    trajectory_complement: float | None = option(
        None, "Probability of replacing a trajectory's state by its complement. Default: 0.", minimum=0,
        maximum=1, tasks=("sft",), fixed=True,
    )  # fmt: skip
    certainty_weight: float = option(
        0.0, "Weight of the entropy of correct predictions (certainty-forcing); 0: not added.", minimum=0,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    certainty_temperature: float = option(
        1.0, "Temperature of the predictions whose entropy is weighted.", above=0, tasks=TRAINING, fixed=True,
        needs=("certainty_weight", None),
    )  # fmt: skip
    z_loss_coeff: float = option(
        0.0,
        "Weight of the z-loss, the mean squared log-sum-exp of the logits; 0: not added.",
        minimum=0,
        tasks=TRAINING,
    )
    mask_annealing_steps: int = option(
        0, "Steps from causal to bidirectional attention.", minimum=0, tasks=TRAINING, fixed=True
    )
    block_schedule: str | None = option(
        None, "Growing step:block size pairs, such as 0:4,1000:8,2000:32.", tasks=TRAINING, fixed=True
    )
    moe_aux_loss: str = megatron_option(
        "seq_aux_loss", "Load balancing loss: aux_loss, seq_aux_loss, global_aux_loss.",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss"), tasks=TRAINING,
    )  # fmt: skip
    moe_aux_loss_coeff: float = megatron_option(
        0.0, "Weight of the load balancing loss; 0: not added.", minimum=0, tasks=TRAINING
    )
    moe_z_loss_coeff: float = megatron_option(
        0.0, "Weight of the router's z-loss; 0: not added.", minimum=0, tasks=TRAINING
    )
    moe_expert_bias_update_rate: float = megatron_option(
        0.0, "Update rate of the routers' expert bias; 0: constant.", minimum=0, tasks=TRAINING
    )
    mtp_loss_scaling_factor: float = megatron_option(
        0.1, "Weight of the multi-token prediction loss; 0: its layers are not trained.", minimum=0,
        tasks=TRAINING, task_defaults={"rl": 0.0},
    )  # fmt: skip

    @cached_property
    def noise_levels(self) -> tuple[float, float] | None:
        """`noise_range` as numbers, or None. Raises SettingError."""
        if self.noise_range is None:
            return None
        try:
            low, high = map(float, comma_separated(self.noise_range))
        except ValueError:
            low, high = -1.0, 0.0
        if not 0 <= low <= high <= 1 or high == 0:
            raise SettingError("noise_range", f"{self.noise_range!r} must be LOW,HIGH within 0 and 1, such as 0.3,0.8")
        return low, high

    @cached_property
    def block_sizes(self) -> tuple[tuple[int, int], ...]:
        """(first step, block size) pairs of `block_schedule` in order; empty by default. Raises SettingError."""
        if self.block_schedule is None:
            return ()
        try:
            pairs = [
                (int(step), int(size)) for step, size in (part.split(":") for part in self.block_schedule.split(","))
            ]
        except ValueError:
            pairs = [(-1, 0)]
        grows = all(step < later and size < larger for (step, size), (later, larger) in itertools.pairwise(pairs))
        if pairs[0][0] != 0 or pairs[0][1] < 1 or not grows:
            raise SettingError(
                "block_schedule",
                f"{self.block_schedule!r} must be growing step:size pairs from step 0 on, such as 0:4,1000:8,2000:32",
            )
        return tuple(pairs)
