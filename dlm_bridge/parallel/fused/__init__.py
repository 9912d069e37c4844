"""Fused Triton kernels for layers with Transformer Engine's modules, for training on NVIDIA GPUs.

docs/training_speed.md has measurements.
"""
