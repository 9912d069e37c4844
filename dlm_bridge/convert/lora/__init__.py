"""LoRA adapters: a PEFT folder of the Hub model, Megatron-layout adapter weights, and both merged into the weights."""
