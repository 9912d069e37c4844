"""DreamReasoner: a block diffusion model on Qwen3 that shares Dream's model type."""
