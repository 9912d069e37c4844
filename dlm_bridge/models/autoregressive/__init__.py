"""Autoregressive families: transformers' own classes, to which only a mapping is added."""
