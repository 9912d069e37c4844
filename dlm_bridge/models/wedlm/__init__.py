"""WeDLM: diffusion decoding under strictly causal attention, on the Qwen2 or the Qwen3 body."""
