"""Serving: OpenAI's completions over HTTP, for diffusion and autoregressive models, on one worker thread."""
