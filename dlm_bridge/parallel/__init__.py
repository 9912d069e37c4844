"""The Megatron-Core engine: platform, process groups, live models with the weights loaded, and the hand-over back."""
