"""SDAR-30B-A3B: Qwen3-MoE turned into a block diffusion model."""
