"""LLaDA2.0 and LLaDA2.1: Bailing-MoE weights turned into a block diffusion model."""
