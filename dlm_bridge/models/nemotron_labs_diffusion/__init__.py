"""Nemotron-Labs-Diffusion: the Ministral-3 body, trained to denoise blocks and to predict the next token at once."""
