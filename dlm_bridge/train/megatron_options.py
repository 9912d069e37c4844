"""The options that only the Megatron engine has: parallel sizes, sharding, recomputation, precision, experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from dlm_bridge.errors import DlmBridgeError

if TYPE_CHECKING:
    from dlm_bridge.convert.layout import Layout
    from dlm_bridge.parallel.context import ParallelConfig

FSDP_STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
RECOMPUTE = ("none", "selective", "full")
DISPATCHERS = ("auto", "alltoall", "allgather", "flex")
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FP8_FORMATS = ("hybrid", "e4m3")
OPTIMIZERS = ("adamw", "sgd")
AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
PASSED_THROUGH = ("transformer", "ddp", "optimizer")  # megatron-core's configuration classes


def option(default: Any, help: str, otherwise: str | None = None, task: str | None = None) -> Any:
    """A field with the text that `--help` shows. A truth value's other flag is --no-NAME, or --`otherwise`; with
    `task` only that command has it."""
    return field(default=default, metadata={"help": help, "otherwise": otherwise, "task": task})


@dataclass(frozen=True)
class MegatronOptions:
    """Names are the command line's flags with underscores. Sizes that a model or a world size cannot have are refused
    when both are known."""

    tp: int = option(1, "Tensor parallel size.")
    pp: int = option(1, "Pipeline parallel size.")
    vp: int = option(1, "Virtual pipeline chunks on each pipeline rank.")
    pipeline_split: str | None = option(None, "Layers of uneven stages: FIRST,LAST or one number a stage.")
    cp: int = option(1, "Context parallel size.")
    cp_comm_type: str = option("p2p", "Context parallel communication: p2p, a2a, allgather or a2a+p2p.")
    hierarchical_cp_sizes: str | None = option(None, "Inner,outer sizes of a2a+p2p, such as 2,4.")
    ep: int = option(1, "Expert parallel size.")
    etp: int | None = option(None, "Expert tensor parallel size; tp by default.")
    sequence_parallel: bool | None = option(None, "Shard activations over tp; on by itself where tp is above 1.")
    distributed_optimizer: bool = option(True, "Shard AdamW's state over data parallel ranks (ZeRO-1).")
    fsdp: str | None = option(None, "Megatron FSDP instead: " + ", ".join(FSDP_STRATEGIES) + ".")
    overlap_communication: bool = option(True, "Overlap gradient and parameter communication with computation.")
    optimizer: str = option("adamw", "adamw or sgd.")
    optimizer_cpu_offload: bool = option(False, "Keep the optimizer's state and step on the CPU.")
    recompute: str = option("none", "Activations to recompute: none, selective or full.")
    recompute_modules: str | None = option(None, "For selective: core_attn,layernorm,mlp,moe,moe_act,...")
    recompute_layers: int | None = option(None, "For full: layers of each stage that are recomputed; all by default.")
    fp8_format: str = option("hybrid", "With --precision fp8: hybrid or e4m3.")
    fp8_recipe: str = option("delayed", "With --precision fp8: " + ", ".join(FP8_RECIPES) + " scaling.")
    fp8_params: bool = option(False, "Keep the weights themselves in FP8.")
    moe_dispatcher: str = option("alltoall", "How tokens reach experts: " + ", ".join(DISPATCHERS) + ".")
    moe_grouped_gemm: bool | None = option(None, "All experts of a rank in one product; on with Transformer Engine.")
    moe_aux_loss: str = option("seq_aux_loss", "Load balancing loss: " + ", ".join(AUX_LOSSES) + ".")
    moe_aux_loss_coeff: float = option(0.0, "Its weight, 0: none.")
    moe_z_loss_coeff: float = option(0.0, "Weight of the router's z-loss, 0: none.")
    moe_expert_bias_update_rate: float = option(0.0, "Of routers with an expert bias, a step; 0: it stays as it is.")
    moe_shared_expert_overlap: bool = option(False, "Compute shared experts beside the dispatcher's communication.")
    async_save: bool = option(False, "Write checkpoints in the background.")
    straggler_interval: int = option(0, "Steps between lines that name the slowest rank, 0: none.")
    save_steps: str | None = option(None, "Further steps to save at, such as 10,50.")
    trackers: str | None = option(None, "tensorboard, wandb, or both with a comma.")
    megatron: list[str] = field(
        default_factory=list,
        metadata={
            "help": "megatron-core's other settings: transformer.KEY=VALUE, ddp.KEY=VALUE, optimizer.KEY=VALUE."
        },
    )

    @property
    def saves(self) -> frozenset[int]:
        """The steps of `save_steps`."""
        return frozenset(whole_numbers("--save-steps", self.save_steps))

    @property
    def hierarchy(self) -> tuple[int, ...] | None:
        """The sizes of `hierarchical_cp_sizes`; None without."""
        return tuple(whole_numbers("--hierarchical-cp-sizes", self.hierarchical_cp_sizes)) or None

    @property
    def layout(self) -> Layout:
        """How the weights are cut. Raises DlmBridgeError."""
        from dlm_bridge.convert.layout import Layout, parse_pipeline_split  # which import torch

        split = {} if self.pipeline_split is None else parse_pipeline_split(self.pipeline_split, self.pp, self.vp)
        return Layout(tp=self.tp, pp=self.pp, vp=self.vp, ep=self.ep, etp=self.etp, **split)

    @property
    def context(self) -> ParallelConfig:
        """How the sequences are cut. Raises DlmBridgeError."""
        from dlm_bridge.parallel.context import ParallelConfig  # which imports torch

        return ParallelConfig(self.cp, self.cp_comm_type, self.hierarchy)

    @property
    def recomputed(self) -> list[str]:
        """The modules of selective recomputation."""
        return names(self.recompute_modules) or ["core_attn"]

    @property
    def sharded_sequence(self) -> bool:
        """Whether sequence parallelism is on."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel and self.tp > 1

    def passed_through(self, group: str) -> dict[str, Any]:
        """What `--megatron GROUP.KEY=VALUE` says of one of `PASSED_THROUGH`, values read as YAML."""
        found = {}
        for setting in self.megatron:
            name, equals, value = setting.partition("=")
            target, dot, key = name.partition(".")
            if not (equals and dot and key) or target not in PASSED_THROUGH:
                raise DlmBridgeError(
                    f"--megatron {setting}: write GROUP.KEY=VALUE with a group of {', '.join(PASSED_THROUGH)}"
                )
            if target == group:
                try:
                    found[key] = yaml.safe_load(value)
                except yaml.YAMLError:
                    raise DlmBridgeError(f"--megatron {setting}: {value} is no value in YAML") from None
        return found


def check_megatron_options(options: MegatronOptions, engine: str, precision: str) -> None:
    """Raise DlmBridgeError for values that no model could have, and for a set option that the engine has not."""
    if engine != "megatron":
        shared = ("save_steps", "trackers")
        for known in dataclasses.fields(MegatronOptions):
            default = known.default if known.default is not dataclasses.MISSING else []
            if known.name not in shared and getattr(options, known.name) != default:
                raise DlmBridgeError(f"{flag(known.name)} needs --engine megatron")
    for name in ("tp", "pp", "vp", "cp", "ep", "etp", "recompute_layers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise DlmBridgeError(f"{flag(name)} must be at least 1, not {value}")
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_bias_update_rate", "straggler_interval"):
        if getattr(options, name) < 0:
            raise DlmBridgeError(f"{flag(name)} must not be negative, not {getattr(options, name)}")
    for name, known_values in (
        ("fsdp", (None, *FSDP_STRATEGIES)),
        ("recompute", RECOMPUTE),
        ("optimizer", OPTIMIZERS),
        ("moe_dispatcher", DISPATCHERS),
        ("moe_aux_loss", AUX_LOSSES),
        ("fp8_recipe", FP8_RECIPES),
        ("fp8_format", FP8_FORMATS),
    ):
        if getattr(options, name) not in known_values:
            known_names = ", ".join(value for value in known_values if value)
            raise DlmBridgeError(f"{flag(name)} {getattr(options, name)!r} is unknown: known are {known_names}")
    for tracker in names(options.trackers):
        if tracker not in ("tensorboard", "wandb"):
            raise DlmBridgeError(f"--trackers {tracker} is unknown: known are tensorboard, wandb")
    if options.saves and min(options.saves) < 1:
        raise DlmBridgeError(f"--save-steps {options.save_steps}: steps count from 1")
    if options.fsdp and options.pp > 1:
        raise DlmBridgeError(
            f"--fsdp {options.fsdp} with --pp {options.pp}: megatron-core's FSDP has no pipeline: choose one of them"
        )
    if options.fsdp and options.optimizer != "adamw":
        raise DlmBridgeError(f"--fsdp with --optimizer {options.optimizer}: megatron-core's FSDP has AdamW only")
    if options.fsdp and options.optimizer_cpu_offload:
        raise DlmBridgeError("--fsdp with --optimizer-cpu-offload: megatron-core offloads without FSDP only")
    if options.fsdp and not options.distributed_optimizer:
        raise DlmBridgeError("--fsdp with --no-distributed-optimizer: FSDP shards it: leave one of them out")
    if options.fsdp and options.async_save:
        raise DlmBridgeError("--fsdp with --async-save: Megatron FSDP's checkpoints are not written in the background")
    if options.sequence_parallel is False and options.tp > 1 and options.ep > 1:
        raise DlmBridgeError(
            f"--tp {options.tp} --ep {options.ep} without sequence parallelism: megatron-core trains no experts so: "
            "leave out --no-sequence-parallel"
        )
    for name, default in (("fp8_params", False), ("fp8_recipe", "delayed"), ("fp8_format", "hybrid")):
        if getattr(options, name) != default and precision != "fp8":
            raise DlmBridgeError(f"{flag(name)} needs --precision fp8")
    for name, how in (("recompute_modules", "selective"), ("recompute_layers", "full")):
        if getattr(options, name) and options.recompute != how:
            raise DlmBridgeError(f"{flag(name)} {getattr(options, name)} needs --recompute {how}")
    if options.optimizer_cpu_offload and options.optimizer != "adamw":
        raise DlmBridgeError("--optimizer-cpu-offload needs --optimizer adamw")
    if options.optimizer_cpu_offload and engine == "megatron" and precision == "fp32":
        raise DlmBridgeError(
            "--optimizer-cpu-offload with --precision fp32: megatron-core offloads no weights in fp32: choose bf16"
        )
    for group in PASSED_THROUGH:
        options.passed_through(group)
    if engine == "megatron":
        options.context  # noqa: B018 (made to be checked)


def names(text: str | None) -> list[str]:
    """The words of a comma-separated option."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def whole_numbers(name: str, text: str | None) -> list[int]:
    """The numbers of a comma-separated option. Raises DlmBridgeError."""
    try:
        return [int(word) for word in names(text)]
    except ValueError:
        raise DlmBridgeError(f"{name} {text}: whole numbers with commas are needed") from None


def flag(name: str) -> str:
    """An option's flag."""
    return "--" + name.replace("_", "-")
