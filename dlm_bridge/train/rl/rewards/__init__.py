"""Rewards that come with the package; each is a function (prompts, completions, rows) -> a number for each."""

from __future__ import annotations

# The short names that --reward takes beside a dotted path and file.py:name.
REWARDS = {
    "countdown": "dlm_bridge.train.rl.rewards.countdown.solved",
    "countdown_form": "dlm_bridge.train.rl.rewards.countdown.well_formed",
    "maths": "dlm_bridge.train.rl.rewards.maths.correct",
    "answer_format": "dlm_bridge.train.rl.rewards.form.answer_format",
}
