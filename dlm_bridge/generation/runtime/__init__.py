"""Execution of forward passes: eager, CUDA graphs, compiled layers; attention over the KV cache; packed rows."""
