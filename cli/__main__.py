"""`python -m dlm_bridge.cli`, for torchrun and accelerate launch."""

from dlm_bridge.cli.app import main

main()
