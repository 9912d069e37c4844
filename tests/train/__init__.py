"""Training: objectives, data, configuration and the Accelerate engine."""
