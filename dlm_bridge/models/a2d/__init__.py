"""dLLM's A2D models: Qwen3, Qwen2 and Llama with the causal mask taken away."""
