"""Fast-dLLM v2: Qwen2.5-Instruct adapted to block diffusion, shifted inside the block."""
