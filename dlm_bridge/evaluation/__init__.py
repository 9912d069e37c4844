"""How good a model is: bounds on likelihoods, perplexity of a text, and lm-evaluation-harness's tasks."""
