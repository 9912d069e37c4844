"""DiffuLLaMA: Llama-2 adapted to diffusion; on the Hub it looks like any Llama."""
