"""Training on one machine: Hub models under Accelerate, with DDP or FSDP2."""
