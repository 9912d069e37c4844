"""SDAR and TraDo: Qwen3 turned into a block diffusion model."""
