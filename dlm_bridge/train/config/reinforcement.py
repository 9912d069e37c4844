"""Options of reinforcement learning and preference optimisation, `dlm-bridge rl`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlm_bridge.errors import SettingError
from dlm_bridge.settings import option
from dlm_bridge.train.config.sections import yaml_value

SAMPLED = ("grpo", "diffu-grpo", "block-grpo", "tracerl")  # methods on sampled completions and their rewards
PREFERRED = ("dpo", "vrpo")  # methods on rows of preferred and rejected answers
METHODS = (*SAMPLED, *PREFERRED)
AUTOREGRESSIVE = ("grpo", "dpo")  # methods of autoregressive models
BETAS = {"grpo": 0.04, "diffu-grpo": 0.04, "block-grpo": 0.04, "tracerl": 0.01, "dpo": 0.1, "vrpo": 0.2}
# Arguments of `generate` that a rollout sets, or that would return other rows than one completion per prompt.
ROLLOUT_ARGUMENTS = (
    "attention_mask", "commit_rule", "generation_config", "generator", "infill", "input_ids", "inputs",
    "num_beams", "num_return_sequences", "output_history", "return_dict_in_generate", "span_lengths", "streamer",
)  # fmt: skip


@dataclass(frozen=True)
class RLOptions:
    """Reinforcement learning and preference optimisation."""

    method: str = option(
        "", f"{', '.join(METHODS)}; grpo and dpo are for autoregressive models.", choices=("", *METHODS), fixed=True,
        common=True,
    )  # fmt: skip
    reward: list[str] = option(
        [], "Function (prompts, completions, rows) -> numbers: a dotted path, file.py:name, countdown, maths; "
        "0.1*NAME weights it. May be repeated.", fixed=True, aliases=("reward_funcs",), common=True,
    )  # fmt: skip
    reward_timeout: float = option(10.0, "Timeout in seconds of a reward for a step's completions.", above=0)
    reward_failure: str = option(
        "stop", "When a reward raises or hangs: stop, or zero (the row's reward is 0).", choices=("stop", "zero")
    )
    eval_data: list[str] = option(
        [], "Held-out rows for evaluation: answered greedily, or compared. May be repeated.", fixed=True, common=True
    )
    group_size: int = option(
        8, "Completions per prompt, compared with each other.", minimum=1, fixed=True, aliases=("num_generations",),
        common=True,
    )  # fmt: skip
    updates: int = option(1, "Number of optimizer steps with each step's completions.", minimum=1, fixed=True)
    gen_length: int = option(
        256, "Maximum length of a completion in tokens.", minimum=1, fixed=True,
        aliases=("max_completion_length", "max_new_tokens"), common=True,
    )  # fmt: skip
    temperature: float = option(
        1.0, "Sampling temperature; held-out prompts are answered at 0.", above=0, fixed=True, common=True
    )
    generation: list[str] = option(
        [], "Other settings of the sampler: NAME=VALUE, such as steps=64. May be repeated.", fixed=True
    )
    rollout_batch_size: int | None = option(
        None, "Number of completions that a process samples at once. Default: as memory allows.", minimum=1
    )
    rollout_tp: int = option(
        1,
        "Tensor parallel size of rollouts, with --sharding fsdp or --engine megatron.",
        minimum=1,
    )
    advantages: str = option(
        "centred", "Rewards minus their group's mean (centred), also divided by its deviation (scaled).",
        choices=("centred", "scaled"), fixed=True,
    )  # fmt: skip
    rl_normalisation: str | None = option(
        None, "Average of the policy loss over completions (rows), all tokens (tokens) or aggregated steps (steps, "
        "the default of tracerl).",
        choices=("rows", "tokens", "steps"), fixed=True,
    )  # fmt: skip
    clip_range: float = option(0.2, "Clipping range of a token's probability ratio.", above=0)
    beta: float | None = option(
        None, "Weight of the KL term; 0: no reference model. Default: 0.04, tracerl 0.01, dpo 0.1, vrpo 0.2.",
        minimum=0, common=True,
    )  # fmt: skip
    prompt_masking: float = option(
        0.15, "diffu-grpo: fraction of prompt tokens masked in a likelihood estimate.", minimum=0, below=1,
        fixed=True,
    )  # fmt: skip
    trace_steps: int | None = option(
        None, "tracerl, and block-grpo of bidirectional models: number of sampler steps whose tokens are predicted "
        "together. Default: 8, block-grpo 32, tracerl of block-causal models 1.", minimum=1, fixed=True,
    )  # fmt: skip
    value_model: bool = option(
        False, "tracerl: also train a value model of the same family, for an advantage per token.", fixed=True,
    )  # fmt: skip
    value_lr: float | None = option(
        None, "Peak learning rate of the value model. Default: --lr.", minimum=0, needs=("value_model", None)
    )
    discount: float = option(
        1.0, "Discount of a reward per aggregated step.", above=0, maximum=1, fixed=True, needs=("value_model", None)
    )
    gae_lambda: float = option(
        1.0, "Lambda of generalised advantage estimation.", minimum=0, maximum=1, fixed=True,
        needs=("value_model", None),
    )  # fmt: skip
    elbo_levels: int = option(8, "vrpo: number of noise levels per likelihood bound.", minimum=1, fixed=True)
    elbo_masks: int = option(1, "vrpo: number of masks per noise level.", minimum=1, fixed=True)

    @property
    def kl_weight(self) -> float:
        """Value of `beta`, by default the method's own."""
        return BETAS[self.method] if self.beta is None else self.beta

    @property
    def has_reference(self) -> bool:
        """True if a KL term compares with the starting model. That of tracerl compares with the sampling model."""
        return self.kl_weight > 0 and self.method != "tracerl"

    @property
    def normalisation(self) -> str:
        """Value of `rl_normalisation`, by default the method's own."""
        return self.rl_normalisation or ("steps" if self.method == "tracerl" else "rows")

    @property
    def sampler(self) -> dict[str, Any]:
        """Settings of `generation` as keyword arguments of a model's generate. Raises SettingError."""
        settings = {}
        for item in self.generation:
            name, equals, value = item.partition("=")
            if not (name.isidentifier() and equals and value):
                raise SettingError("generation", f"{item} must be NAME=VALUE, such as steps=64")
            if name in ("gen_length", "max_new_tokens", "temperature", "seed"):
                raise SettingError(
                    "generation",
                    f"{item} is an option of its own: `{'gen_length' if name == 'max_new_tokens' else name}`",
                )
            if name in ROLLOUT_ARGUMENTS:
                raise SettingError(
                    "generation", f"{item} is not supported: a rollout samples one completion per prompt"
                )
            settings[name] = yaml_value("generation", value)
        return settings
