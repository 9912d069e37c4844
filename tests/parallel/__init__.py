"""The live model of the Megatron engine."""
