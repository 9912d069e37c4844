"""Planning from a model's config alone: parameters and memory per rank, step time, recommended layouts, dry run."""
