"""What makes a step of the Accelerate engine fast: compiled layers, attention kernels, losses without logits."""
