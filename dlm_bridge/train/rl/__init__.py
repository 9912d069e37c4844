"""Reinforcement learning and preference optimisation (diffu-GRPO, GRPO, VRPO, DPO).

`rows` reads prompts and preferences; `rollout` samples completions and scores them (`reward_worker` runs the functions
of `rewards`); `likelihood` estimates a diffusion model's log-probabilities of them; `updates` has the losses; `engine`
trains under Accelerate, `trl_engine` through TRL (autoregressive models).
"""
