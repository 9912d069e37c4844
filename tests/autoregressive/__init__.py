"""Autoregressive families."""
