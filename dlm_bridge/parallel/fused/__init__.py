"""Kernels of several steps in one pass over memory, in Triton, for layers of Transformer Engine's modules."""
