"""Kernels of several steps in one pass over memory, in Triton, for layers of Transformer Engine's modules.

For training on NVIDIA GPUs; their share of a step is in docs/training_speed.md (November 2026).
"""
