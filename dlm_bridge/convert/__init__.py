"""Checkpoint conversion between the Hub's layout and Megatron's, without megatron-core and without a GPU."""
