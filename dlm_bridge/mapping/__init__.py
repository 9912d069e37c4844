"""Mapping rules between Hub and Megatron tensors, parallel layouts, dtypes: what models and conversion share."""
