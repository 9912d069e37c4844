"""Kernels of several steps in one pass over memory, in Triton, for layers of Transformer Engine's modules: for training
on NVIDIA GPUs, where they take a third of the time of the kernels that they replace (docs/training_speed.md, November
2026)."""
