"""LLaDA-8B and LLaDA-1.5: the Llama body, bidirectional, with OLMo's names on the Hub."""
