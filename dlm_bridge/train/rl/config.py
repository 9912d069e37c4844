"""The configuration of a reinforcement learning run: what training has, and what only it has."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig, load_as
from dlm_bridge.train.megatron_options import flag, option

SAMPLED = ("grpo", "diffu-grpo", "block-grpo")  # methods whose completions are sampled and judged
PREFERRED = ("dpo", "vrpo")  # methods that follow preferred rows
METHODS = (*SAMPLED, *PREFERRED)
AUTOREGRESSIVE = ("grpo", "dpo")  # what TRL trains
FAILURES = ("stop", "zero")
ADVANTAGES = ("centred", "scaled")
BETAS = {"grpo": 0.04, "diffu-grpo": 0.04, "block-grpo": 0.04, "dpo": 0.1, "vrpo": 0.2}
# What rollouts themselves say to generate, or what would make other rows than a completion behind each prompt.
NO_SETTINGS = (
    "attention_mask", "commit_rule", "generation_config", "generator", "infill", "input_ids", "inputs",
    "num_return_sequences", "output_history", "return_dict_in_generate", "span_lengths", "streamer",
)  # fmt: skip
# The options of the other training commands that this one has too.
SHARED = (
    "task", "model", "data", "output", "engine", "family", "mask_token_id", "tokenizer", "steps", "global_batch_size",
    "micro_batch_size", "seq_length", "seed", "precision", "lr", "lr_schedule", "warmup_steps", "min_lr",
    "weight_decay", "beta1", "beta2", "adam_eps", "clip_grad", "eval_interval", "save_interval", "keep_last",
    "exit_duration", "attention_backend", "gradient_checkpointing", "save_steps", "trackers",
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_quantize",
    "adapter",
)  # fmt: skip


@dataclass(frozen=True)
class RLConfig(TrainConfig):
    """Names are the command line's flags with underscores. Checked when it is made: DlmBridgeError names the flag.

    A step samples (or reads) `global_batch_size` completions (or pairs), over all processes, and updates the model
    `updates` times with them."""

    fixed: ClassVar[tuple[str, ...]] = (
        "family", "mask_token_id", "seq_length", "global_batch_size", "seed", "method", "reward", "eval_data",
        "group_size", "updates", "gen_length", "temperature", "generation", "advantages", "prompt_masking",
        "trace_steps", "elbo_levels", "elbo_masks",
    )  # fmt: skip

    task: str = field(default="rl", metadata={"help": None})
    method: str = option("", f"{', '.join(METHODS)}; grpo and dpo are for autoregressive models.")
    reward: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Function (prompts, completions, rows) -> numbers: package.module.name, file.py:name, countdown, "
            "maths, ...; 0.1*NAME weighs it. May be repeated."
        },
    )
    reward_timeout: float = option(10.0, "Seconds that a reward may take for a step's completions.")
    reward_failure: str = option("stop", "When a reward raises or hangs: stop, or zero (such a row counts as 0).")
    eval_data: list[str] = field(
        default_factory=list, metadata={"help": "Held-out rows, answered greedily (or compared). May be repeated."}
    )
    group_size: int = option(8, "Completions of each prompt, which are compared with each other.")
    updates: int = option(1, "Optimizer steps with each step's completions.")
    gen_length: int = option(256, "Longest completion, in tokens.")
    temperature: float = option(1.0, "Of sampling; held-out prompts are answered at 0.")
    generation: list[str] = field(
        default_factory=list,
        metadata={"help": "Further settings of the sampler, NAME=VALUE such as steps=64. May be repeated."},
    )
    advantages: str = option("centred", "Rewards less their group's mean (centred), or over its deviation (scaled).")
    clip_range: float = option(0.2, "How far a token's probability ratio may move with profit.")
    beta: float | None = option(None, "Weight of the KL term (0.04, 0: no reference model), of dpo and vrpo 0.1, 0.2.")
    prompt_masking: float = option(0.15, "Of diffu-grpo: the share of prompt tokens hidden in a likelihood.")
    trace_steps: int = option(
        32, "Of block-grpo and bidirectional models: forwards of the sampler that a likelihood takes at once."
    )
    elbo_levels: int = option(8, "Of vrpo: noise levels drawn for each likelihood bound.")
    elbo_masks: int = option(1, "Of vrpo: masks drawn at each of them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    @property
    def kl_weight(self) -> float:
        """`beta`, or the method's own."""
        return BETAS[self.method] if self.beta is None else self.beta

    @property
    def sampler(self) -> dict[str, Any]:
        """The settings of `generation`, as keyword arguments of a model's generate."""
        settings = {}
        for item in self.generation:
            name, equals, value = item.partition("=")
            if not (name.isidentifier() and equals and value):
                raise DlmBridgeError(f"--generation {item}: NAME=VALUE is needed, such as steps=64")
            if name in ("gen_length", "max_new_tokens", "temperature", "seed"):
                raise DlmBridgeError(f"--generation {item}: the option --{name.replace('_', '-')} says it")
            if name in NO_SETTINGS:
                raise DlmBridgeError(
                    f"--generation {item}: a rollout is one completion behind each prompt: leave it out"
                )
            settings[name] = yaml.safe_load(value)
        return settings

    def groups(self, processes: int) -> int:
        """How many prompts each process samples for in a step. Raises DlmBridgeError where a step's completions are
        not whole groups for each."""
        share = self.group_size * processes
        if self.global_batch_size % share:
            raise DlmBridgeError(
                f"--global-batch-size {self.global_batch_size} must be a multiple of {share} "
                f"(--group-size {self.group_size} x {processes} processes)"
            )
        return self.global_batch_size // share


def load_rl_config(flags: dict[str, Any], file: Path | None = None, resume: bool = False) -> RLConfig:
    """The configuration of a run, see `dlm_bridge.train.config.load_as`."""
    return load_as(RLConfig, flags, file, resume, "rl")


def _check(config: RLConfig) -> None:
    if config.task != "rl":
        raise DlmBridgeError(f"the configuration is of dlm-bridge {config.task}: this is dlm-bridge rl")
    for known in dataclasses.fields(TrainConfig):
        if known.name not in SHARED:
            default = known.default_factory() if callable(known.default_factory) else known.default
            if getattr(config, known.name) not in (default, 0.0, None):
                raise DlmBridgeError(f"{flag(known.name)} is no option of dlm-bridge rl")
    if not config.method:
        raise DlmBridgeError(f"--method is missing: one of {', '.join(METHODS)}")
    for name, names in (("method", METHODS), ("reward_failure", FAILURES), ("advantages", ADVANTAGES)):
        if getattr(config, name) not in names:
            raise DlmBridgeError(f"{flag(name)} {getattr(config, name)!r} is unknown: known are {', '.join(names)}")
    if config.engine != "accelerate":
        raise DlmBridgeError("--engine megatron: reinforcement learning runs under accelerate only")
    if config.precision == "fp8":
        raise DlmBridgeError("--precision fp8: reinforcement learning runs in fp32, bf16 or fp16")
    for name in ("group_size", "updates", "gen_length", "trace_steps", "elbo_levels", "elbo_masks"):
        if getattr(config, name) < 1:
            raise DlmBridgeError(f"{flag(name)} must be at least 1, not {getattr(config, name)}")
    for name in ("reward_timeout", "temperature", "clip_range"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            raise DlmBridgeError(f"{flag(name)} must be a number above 0, not {getattr(config, name)}")
    if not 0 <= config.prompt_masking < 1:
        raise DlmBridgeError(f"--prompt-masking must be in [0, 1), not {config.prompt_masking}")
    if not (math.isfinite(config.kl_weight) and config.kl_weight >= 0):
        raise DlmBridgeError(f"--beta must be a number that is not negative, not {config.beta}")
    _ = config.sampler
    if config.method in SAMPLED:
        if not config.reward:
            raise DlmBridgeError(f"--method {config.method} needs a --reward")
        if config.group_size < 2:
            raise DlmBridgeError("--group-size 1: a completion is compared with others of its prompt, take 2 or more")
        if config.gen_length >= config.seq_length:
            raise DlmBridgeError(
                f"--gen-length {config.gen_length} leaves no room for a prompt in --seq-length {config.seq_length}"
            )
        config.groups(processes=1)
    elif config.reward:
        raise DlmBridgeError(f"--reward: --method {config.method} follows the rows' preferences, leave it out")
