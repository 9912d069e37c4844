"""The options that only the Accelerate engine has: sharding over devices, and adapters in place of whole weights."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.megatron_options import flag, names, option

SHARDINGS = ("none", "fsdp")
QUANTIZATIONS = ("4bit", "8bit")
OF_A_NEW_ADAPTER = ("lora_alpha", "lora_dropout", "lora_targets")


@dataclass(frozen=True)
class AccelerateOptions:
    """Names are the command line's flags with underscores. What the model or the machine cannot do is refused when
    they are known."""

    sharding: str = option(
        "none",
        "Over processes: none (each has the whole model) or fsdp (FSDP2: weights, gradients and optimizer cut).",
    )
    cpu_offload: bool = option(False, "With --sharding fsdp: keep weights and optimizer in the CPU's memory.")
    lora_rank: int = option(0, "Train a LoRA adapter of this rank in place of the weights, 0: none.")
    lora_alpha: float | None = option(None, "Its scale times its rank; twice the rank by default.")
    lora_dropout: float = option(0.0, "Dropout before the adapter.")
    lora_targets: str | None = option(None, "Linear layers that it changes, such as q_proj,v_proj; the family's.")
    lora_quantize: str | None = option(None, "Hold the base's linear layers in 4bit (NF4) or 8bit, by bitsandbytes.")
    adapter: str | None = option(None, "Folder of a PEFT LoRA adapter of --model to go on training.")

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained, and not the weights."""
        return self.lora_rank > 0 or self.adapter is not None

    @property
    def shards(self) -> bool:
        """Whether each process holds a part of the weights."""
        return self.sharding == "fsdp"


def check_accelerate_options(options: AccelerateOptions, engine: str, precision: str) -> None:
    """Raise DlmBridgeError for values that no run could have, and for a set option that the engine has not."""
    if engine != "accelerate":
        for known in dataclasses.fields(AccelerateOptions):
            if getattr(options, known.name) != known.default:
                raise DlmBridgeError(f"{flag(known.name)} needs --engine accelerate")
    if options.sharding not in SHARDINGS:
        raise DlmBridgeError(f"--sharding {options.sharding!r} is unknown: known are {', '.join(SHARDINGS)}")
    if options.cpu_offload and not options.shards:
        raise DlmBridgeError("--cpu-offload needs --sharding fsdp")
    if options.shards and precision == "fp16":
        raise DlmBridgeError("--precision fp16 with --sharding fsdp: gradients are not scaled there: use bf16")
    if options.lora_rank < 0:
        raise DlmBridgeError(f"--lora-rank must not be negative, not {options.lora_rank}")
    if options.lora_alpha is not None and not (math.isfinite(options.lora_alpha) and options.lora_alpha > 0):
        raise DlmBridgeError(f"--lora-alpha must be a positive number, not {options.lora_alpha}")
    if not 0 <= options.lora_dropout < 1:
        raise DlmBridgeError(f"--lora-dropout must be in [0, 1), not {options.lora_dropout}")
    if options.lora_targets is not None and not names(options.lora_targets):
        raise DlmBridgeError("--lora-targets names nothing: leave it out for the family's own")
    if options.lora_quantize not in (None, *QUANTIZATIONS):
        raise DlmBridgeError(
            f"--lora-quantize {options.lora_quantize!r} is unknown: known are {', '.join(QUANTIZATIONS)}"
        )
    if options.adapter is not None and options.lora_rank:
        raise DlmBridgeError("--adapter has a rank of its own: leave --lora-rank out")
    for name in OF_A_NEW_ADAPTER:
        set_to = getattr(options, name)
        if set_to and not options.lora_rank:
            raise DlmBridgeError(f"{flag(name)} {set_to}: it is of a new adapter, which --lora-rank makes")
    if options.lora_quantize and not options.adapts:
        raise DlmBridgeError("--lora-quantize needs an adapter: add --lora-rank N, or --adapter")
    if options.lora_quantize and precision == "fp8":
        raise DlmBridgeError("--lora-quantize with --precision fp8: a base in few bits has no FP8 products: use bf16")
    if options.lora_quantize and options.shards:
        raise DlmBridgeError(
            "--lora-quantize with --sharding fsdp: quantized weights cannot be cut: choose one of them"
        )
