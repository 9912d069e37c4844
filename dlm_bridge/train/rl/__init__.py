"""Reinforcement learning: completions are sampled and judged, or preferred by rows, and the model follows.

`prompts` and `preferences` read rows; `rollout` samples completions and judges them (`judge`, with `rewards` in a
`worker` process); `likelihood` estimates what a diffusion model thinks of them; `policy` and `preference` are the
updates; `engine` puts them together under Accelerate, `trl_engine` hands autoregressive models to TRL.
"""
