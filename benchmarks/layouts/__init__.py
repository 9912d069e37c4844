"""Every layout of the Megatron engine against one process, on GPUs; see README.md."""
