"""Distillation of a diffusion model from an autoregressive parent, on data rows or on texts that the model samples.

`config` declares the options; `losses` has the divergence and pairs a noisy batch with the parent's input; `sampling`
has the texts of on-policy runs; `trainer` is the Accelerate engine's trainer with this loss; `dry_run` plans a run.
"""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "train.distill",
    needs=("train.rl",),
    commands={"distill": "dlm_bridge.train.distill.command:register"},
    features={"distill --dry-run": "dlm_bridge.train.distill.dry_run:distill_dry_run"},
)
