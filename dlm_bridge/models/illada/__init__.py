"""iLLaDA: a masked diffusion language model from scratch on the Llama body, with tied embeddings."""
