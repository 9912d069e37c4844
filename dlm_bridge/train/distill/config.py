"""Configuration of `dlm-bridge distill`: that of fine-tuning, with a parent and a divergence."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dlm_bridge.errors import SettingError
from dlm_bridge.settings import option
from dlm_bridge.train.config import TrainConfig, refuse
from dlm_bridge.train.config.files import load_config_as, read_run_config, read_yaml
from dlm_bridge.train.config.reinforcement import RLOptions

TASK = "sft"  # whose options, defaults and rows the command has


@dataclass(frozen=True)
class DistillOptions:
    """Distillation."""

    parent: str | None = option(
        None, "Autoregressive model with the same tokens. Default: the base under the adapter, with causal attention.",
        fixed=True, common=True,
    )  # fmt: skip
    on_policy: bool = option(
        False, "Train on texts that the model samples from the prompts of --data, not on the rows' answers.",
        negative="--off-policy", fixed=True, common=True,
    )  # fmt: skip
    divergence: str = option(
        "forward", "KL(parent || model) (forward), KL(model || parent) (reverse) or Jensen-Shannon (js).",
        choices=("forward", "reverse", "js"), fixed=True, common=True,
    )  # fmt: skip
    gen_length: int = option(
        256, "Maximum length of a sampled text in tokens.", minimum=1, fixed=True, needs=("on_policy", None),
        aliases=("max_new_tokens",), common=True,
    )  # fmt: skip
    temperature: float = option(1.0, "Sampling temperature.", minimum=0, fixed=True, needs=("on_policy", None))
    generation: list[str] = option(
        [], "Other settings of the sampler: NAME=VALUE, such as steps=64. May be repeated.", fixed=True,
        needs=("on_policy", None),
    )  # fmt: skip
    rollout_batch_size: int | None = option(
        None, "Number of texts that a process samples at once. Default: as memory allows.", minimum=1,
        needs=("on_policy", None),
    )  # fmt: skip

    @property
    def sampler(self) -> dict[str, Any]:
        """Settings of `generation` as keyword arguments of a model's generate. Raises SettingError."""
        return RLOptions(generation=self.generation).sampler


@dataclass(frozen=True)
class DistillConfig(TrainConfig):
    """Configuration of `distill`."""

    task: str = TASK
    distill: DistillOptions = field(default_factory=DistillOptions)

    tasks: ClassVar[tuple[str, ...]] = (TASK,)

    def _check(self) -> None:
        super()._check()
        distill, data = self.distill, self.data
        refuse(
            (self.engine.engine != "accelerate", "engine",
             f"{self.engine.engine} does not support distillation: use `engine=accelerate`"),
            (distill.parent is None and not self.model.adapts, "parent",
             "is missing: name an autoregressive model, or train an adapter (`lora_rank`), whose base is the parent"),
            (data.eos_padding not in (None, "none"), "eos_padding",
             f"{data.eos_padding}: a parent predicts nothing after the end of a text: use none"),
            (self.objective.z_loss_coeff, "z_loss_coeff", "is not supported in distillation: set it to 0"),
            (self.precision.precision == "fp8", "precision",
             "fp8 is not supported in distillation: use fp32, bf16 or fp16"),
        )  # fmt: skip
        if not distill.on_policy:
            return
        _ = distill.sampler  # raises SettingError for malformed values
        refuse(
            (0 < data.seq_length <= distill.gen_length, "gen_length",
             f"{distill.gen_length} leaves no room for a prompt in `seq_length={data.seq_length}`"),
            (data.valid_data, "valid_data", "excludes `on_policy`: evaluate the checkpoints with dlm-bridge eval"),
            (data.packing, "packing", "excludes `on_policy`: a row is one sampled text"),
            (self.parallel.shards, "sharding",
             "fsdp excludes `on_policy`, which samples from the whole model: use data parallelism, or `lora_rank`"),
        )  # fmt: skip


def load_distill_config(flags: dict[str, Any], file: Path | None = None, resume: bool = False) -> DistillConfig:
    """Load the configuration of a run of `distill`; see `load_config_as`. Raises SettingError for the output of a run
    of `sft`."""
    given = flags if file is None else read_yaml(file, DistillConfig) | flags
    own = Path(given.get("output", "")) / "config.yaml"
    if resume and own.is_file() and "divergence" not in read_run_config(own, DistillConfig):
        raise SettingError("output", f"{given['output']} contains a run of another command than dlm-bridge distill")
    return load_config_as(DistillConfig, flags, file, resume, TASK)
