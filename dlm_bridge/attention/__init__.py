"""Attention for training and sampling: mask descriptors, FlashAttention."""
