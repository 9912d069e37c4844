"""Training: objectives, configuration and the Accelerate engine."""
