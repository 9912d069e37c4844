"""Model families: specs, mappings to Megatron, configs and model classes."""
