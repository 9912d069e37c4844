"""Training: objectives, data, configuration, metrics and checkpoints that every engine shares, and the engines."""
