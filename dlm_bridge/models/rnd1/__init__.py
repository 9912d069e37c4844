"""RND1: Qwen3-MoE made bidirectional, trained to predict the next position."""
