"""Triton kernels and fused layers."""
