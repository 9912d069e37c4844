"""Training on megatron-core: its groups, schedules, optimizers and checkpoints, with our objectives and data."""
