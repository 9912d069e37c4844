"""LLaDA-MoE-7B-A1B: the Qwen3-MoE body, bidirectional, trained from scratch."""
