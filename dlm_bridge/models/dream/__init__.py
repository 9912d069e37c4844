"""Dream, Dream-Coder and DiffuCoder: the Qwen2 body, bidirectional, trained to predict the next position."""
