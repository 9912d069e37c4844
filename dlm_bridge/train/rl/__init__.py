"""Reinforcement learning and preference optimisation (diffu-GRPO, TraceRL, GRPO, VRPO, DPO).

`rows` reads prompts and preferences; `rollout` samples completions and scores them (`reward_worker` runs the functions
of `rewards`); `likelihood` has a model's log-probabilities of them, or estimates of a diffusion model's; `updates` has
the losses; `policy` and `preference` are the loop, over an `update_engine`: `accelerate_engine` or `megatron_engine`.
`engine` starts a run.
"""
