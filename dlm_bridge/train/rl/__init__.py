"""Reinforcement learning and preference optimisation (diffu-GRPO, TraceRL, GRPO, VRPO, DPO).

`rows` reads prompts and preferences; `rollout` samples completions and scores them (`reward_worker` runs the functions
of `rewards`); `likelihood` has a model's log-probabilities of them, or estimates of a diffusion model's; `updates` has
the losses; `policy` and `preference` are the loop of `trainer`, over the engine of `accelerate_engine`, whose `train`
starts a run, or of `megatron_engine`.
"""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "train.rl",
    commands={"rl": "dlm_bridge.train.rl.command:register"},
    features={"rl --dry-run": "dlm_bridge.train.rl.dry_run:rl_dry_run"},
)
