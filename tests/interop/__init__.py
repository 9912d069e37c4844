"""Proof against megatron-core itself: two processes, gloo, CPU."""
