"""What the training proof is about: tiny models, their batches, Adam, and every check in order."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from dlm_bridge import Layout
from tests.checkpoints import llada_config, llada_tensors
from tests.families.llada2_moe import CASE as LLADA2_MOE
from tests.families.llada_moe import CASE as LLADA_MOE
from tests.interop.cases import Model

LENGTH, BATCH, STEPS = 8, 4, 3  # tokens a sample; samples a step over all replicas

MODELS = {
    "dense": Model(llada_config(torch_dtype="float32", n_kv_heads=2), llada_tensors),
    # The first and the last pipeline stage hold the same weight; a vocabulary that two ranks do not share evenly.
    "tied": Model(
        llada_config(torch_dtype="float32", weight_tying=True, vocab_size=125, embedding_size=125, mask_token_id=124),
        llada_tensors,
    ),
    # Sigmoid routing in groups with an expert bias, shared experts, a leading dense layer.
    "grouped": Model({**LLADA2_MOE.config, "torch_dtype": "float32", "block_size": 4}, LLADA2_MOE.tensors),
    # Softmax routing and norms of query and key heads.
    "softmax": Model({**LLADA_MOE.config, "torch_dtype": "float32"}, LLADA_MOE.tensors),
}

# A large epsilon: where a gradient is nothing but rounding, Adam would still take a whole step in its direction.
ADAM: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-4}
CLIP = 0.5  # every step's gradient is longer

LAYOUTS = {
    "dp2": Layout(),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2_vp2": Layout(pp=2, vp=2),
    "ep2": Layout(ep=2),
    "tp2_ep2": Layout(tp=2, ep=2, etp=1),
    "embedding_first": Layout(pp=2, pipeline="E|ttttL"),  # the first stage has no experts
}

SEQUENCE_PARALLEL = {"sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True}
OVERLAP_BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SMALL_BUCKETS = {"bucket_size": 20_000}  # several a model
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
SHARED_OVERLAP = {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True}

# Auxiliary losses that do not depend on which samples share a micro-batch, and the expert bias's update.
BALANCED = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [1e-1, 1e-1],
    "moe_z_loss_coeff": 1e-2,
    "moe_router_bias_update_rate": 1e-3,
}
DISPATCHERS = ("allgather", "alltoall")
LOSS_SCALE = {"initial_loss_scale": 2.0**12}  # of fp16; bf16 has none
GLOBALLY_BALANCED = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [1e-1]}

# What one process trains for the others to be compared with: its model, and its `Setup`.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "balanced": ("grouped", {"model": BALANCED}),
    "bf16": ("dense", {"dtype": "bf16"}),
    "fp16": ("dense", {"dtype": "fp16", "optimizer": LOSS_SCALE}),
}

Checks = dict[str, tuple[str, dict[str, Any]]]


def plan() -> Checks:
    """Every check that two processes run, in order: its name, its function in `training_checks`, and the arguments."""
    alone = [("trains_alone", name, {"name": name}) for name in ALONE]
    everything = [*alone, *_as_torch(), *_alike(), *_saved()]
    return {f"{function}[{label}]": (function, case) for function, label, case in everything}


def _as_torch() -> list[tuple[str, str, dict[str, Any]]]:
    """Compared with transformers' model under torch's AdamW on one process; layout by layout, as groups take time."""
    found = []

    def add(model: str, layout: str, optimizer: str, *labels: str, **more: Any) -> None:
        case = {"model": model, "layout": layout, "distributed": optimizer == "distributed", **more}
        found.append(("trains_as_torch_does", "-".join([model, layout, optimizer, *labels]), case))

    add("dense", "dp2", "plain")
    add("dense", "dp2", "plain", "overlap", ddp=OVERLAP | SMALL_BUCKETS)
    add("dense", "dp2", "distributed")
    add("dense", "dp2", "distributed", "overlap", ddp=OVERLAP_BOTH | SMALL_BUCKETS)
    add("dense", "pp2", "distributed")
    add("tied", "pp2", "plain")
    add("grouped", "pp2", "distributed")
    add("dense", "pp2_vp2", "plain")
    add("dense", "pp2_vp2", "distributed", "overlap", ddp=OVERLAP_BOTH)
    add("tied", "tp2", "distributed")
    add("dense", "tp2", "plain", "sp", options=SEQUENCE_PARALLEL)
    for name, recompute in (("full", FULL), ("selective", SELECTIVE)):
        add("dense", "tp2", "distributed", "sp", name, options=SEQUENCE_PARALLEL | recompute)
    add("softmax", "tp2_ep2", "distributed", "sp", options=SEQUENCE_PARALLEL)
    for dispatcher in DISPATCHERS:
        options = {"moe_token_dispatcher_type": dispatcher}
        add("grouped", "ep2", "plain", dispatcher, options=options)
        add("softmax", "ep2", "distributed", dispatcher, "overlap", options=options | FULL, ddp=OVERLAP_BOTH)
    add("grouped", "ep2", "distributed", "shared", options=SHARED_OVERLAP)
    if importlib.util.find_spec("einops") is not None:  # which megatron-core makes the groups of instances with
        instances = OVERLAP | {"num_distributed_optimizer_instances": 2}
        add("dense", "dp2", "distributed", "instances", ddp=instances)
    return found


def _alike() -> list[tuple[str, str, dict[str, Any]]]:
    """Compared with megatron-core itself, in another layout or another setting."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    for layout, dispatcher in (
        ("ep2", "allgather"),
        ("ep2", "alltoall"),
        ("tp2_ep2", "alltoall"),
        ("pp2", "allgather"),
    ):
        options = {"moe_token_dispatcher_type": dispatcher, "sequence_parallel": layout == "tp2_ep2"}
        found.append(("balances_alike", f"{layout}-{dispatcher}", {"layout": layout, "options": options}))
    found.append(("balances_globally_alike", "ep2", {}))
    found.append(("recomputes_the_same_dropout", "tp2", {}))
    for dtype in ("bf16", "fp16"):
        found.append(("half_precision_trains_alike", dtype, {"dtype": dtype}))
    found.append(("an_overflow_is_skipped", "fp16", {}))
    return found


def _saved() -> list[tuple[str, str, dict[str, Any]]]:
    """Saved, loaded and continued."""
    found: list[tuple[str, str, dict[str, Any]]] = []

    def add(name: str, **case: Any) -> None:
        found.append(("continues", name, {"name": name, **case}))

    add("plain")
    add("plain-fp16-first", dtype="fp16", before=0)
    add("fully_reshardable", sharding="fully_reshardable", parallel=True)
    add("fully_reshardable-bf16", dtype="bf16", sharding="fully_reshardable", asynchronous=True)
    add("fully_reshardable-first", sharding="fully_reshardable", before=0)
    add("dp_reshardable", sharding="dp_reshardable", parallel=True)
    add("dp_reshardable-experts-fp16", model="softmax", layout="ep2", dtype="fp16", sharding="dp_reshardable")
    add("plain-experts-on-one-stage", model="softmax", layout="embedding_first")
    add("experts-on-one-stage", model="softmax", layout="embedding_first", sharding="fully_reshardable")
    for source, target in (("dp2", "tp2"), ("pp2_vp2", "dp2")):
        found.append(("continues_elsewhere", f"{source}-{target}", {"source": source, "target": target}))
    for sharding in ("fully_reshardable", "dp_reshardable"):
        found.append(("continues_alone", sharding, {"sharding": sharding}))
    return found


def batch(step: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids [B, L] and what the logits shall be [B, L, V], of one step."""
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randint(0, vocab, (BATCH, LENGTH), generator=generator),
        torch.randn(BATCH, LENGTH, vocab, generator=generator),
    )


class Files:
    """Paths below the folder that the tests and the two processes share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def hub(self, model: str) -> Path:
        return self.root / "hub" / model

    def reference(self, model: str) -> Path:
        """The losses, gradient norms and weights of transformers' model under torch's AdamW."""
        return self.root / f"reference_{model}.pt"

    def alone(self, name: str, rank: int) -> Path:
        """What a process trained on its own."""
        return self.root / f"alone_{name}_{rank}.pt"

    def saved(self, name: str) -> Path:
        return self.root / "saved" / name
