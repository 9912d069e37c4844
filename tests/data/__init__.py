"""Training data: documents, conversations, token files, blends and the batches made of them."""
