"""Execution of forward passes: eager, CUDA graphs, compiled layers; attention kernels; fused linear layers."""
