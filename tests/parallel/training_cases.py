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
SHARDINGS = ("fully_reshardable", "dp_reshardable")  # of the distributed optimizer's state
LOSS_SCALE = {"initial_loss_scale": 2.0**12}  # of fp16; bf16 has none
GLOBALLY_BALANCED = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [1e-1]}

# What one process trains for the others to be compared with: its model, and its `Setup`.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "balanced": ("grouped", {"model": BALANCED}),
    "bf16": ("dense", {"dtype": "bf16"}),
    "fp16": ("dense", {"dtype": "fp16", "optimizer": LOSS_SCALE}),
}

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
    """Compared with transformers' model under torch's AdamW on one process."""
    found = []

    def add(label: str, model: str, layout: str, **more: Any) -> None:
        found.append(("trains_as_torch_does", label, {"model": model, "layout": layout, **more}))

    for distributed in (False, True):
        kind = "distributed" if distributed else "plain"
        add(f"dense-dp2-{kind}", "dense", "dp2", distributed=distributed)
        add(f"dense-dp2-{kind}-overlap", "dense", "dp2", distributed=distributed, ddp=OVERLAP | SMALL_BUCKETS)
        add(f"dense-pp2-{kind}", "dense", "pp2", distributed=distributed)
        add(f"tied-pp2-{kind}", "tied", "pp2", distributed=distributed)
        add(f"dense-pp2_vp2-{kind}", "dense", "pp2_vp2", distributed=distributed)
        add(f"dense-pp2_vp2-{kind}-overlap", "dense", "pp2_vp2", distributed=distributed, ddp=OVERLAP)
        add(f"tied-tp2-{kind}", "tied", "tp2", distributed=distributed)
        for model in ("dense", "softmax"):
            layout = "tp2_ep2" if model == "softmax" else "tp2"
            add(f"{model}-{layout}-sp-{kind}", model, layout, distributed=distributed, options=SEQUENCE_PARALLEL)
        for model in ("grouped", "softmax"):
            for dispatcher in ("allgather", "alltoall"):
                options = {"moe_token_dispatcher_type": dispatcher}
                add(f"{model}-ep2-{dispatcher}-{kind}", model, "ep2", distributed=distributed, options=options)
    both = OVERLAP_BOTH | SMALL_BUCKETS
    add("dense-dp2-distributed-overlap-both", "dense", "dp2", distributed=True, ddp=both)
    add("softmax-ep2-distributed-overlap-both", "softmax", "ep2", distributed=True, ddp=both)
    add("dense-pp2_vp2-distributed-overlap-both", "dense", "pp2_vp2", distributed=True, ddp=OVERLAP_BOTH)
    if importlib.util.find_spec("einops") is not None:  # which megatron-core makes the groups of instances with
        instances = OVERLAP | {"num_distributed_optimizer_instances": 2}
        add("dense-dp2-two-instances", "dense", "dp2", distributed=True, ddp=instances)
    add("grouped-pp2", "grouped", "pp2", distributed=True)
    add("grouped-ep2-shared-overlap", "grouped", "ep2", options=SHARED_OVERLAP)
    for name, recompute in (("full", FULL), ("selective", SELECTIVE)):
        add(f"dense-tp2-sp-recompute-{name}", "dense", "tp2", options=SEQUENCE_PARALLEL | recompute)
        add(f"softmax-ep2-recompute-{name}", "softmax", "ep2", options=recompute)
    return found


def _alike() -> list[tuple[str, str, dict[str, Any]]]:
    """Compared with megatron-core itself, in another layout or another setting."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    for layout, options in (("ep2", {}), ("tp2_ep2", SEQUENCE_PARALLEL), ("pp2", {})):
        for dispatcher in ("allgather", "alltoall"):
            options = {**options, "moe_token_dispatcher_type": dispatcher}
            found.append(("balances_alike", f"{layout}-{dispatcher}", {"layout": layout, "options": options}))
    for dispatcher in ("allgather", "alltoall"):
        found.append(("balances_globally_alike", dispatcher, {"dispatcher": dispatcher}))
    found.append(("recomputes_the_same_dropout", "full", {}))
    for dtype in ("bf16", "fp16"):
        found.append(("half_precision_trains_alike", dtype, {"dtype": dtype}))
    found.append(("an_overflow_is_skipped", "fp16", {}))
    return found


def _saved() -> list[tuple[str, str, dict[str, Any]]]:
    """Saved, loaded and continued."""
    found: list[tuple[str, str, dict[str, Any]]] = []

    def add(name: str, **case: Any) -> None:
        found.append(("continues", name, {"name": name, **case}))

    for dtype in ("fp32", "bf16", "fp16"):
        add(f"plain-{dtype}", dtype=dtype, distributed=False)
        for sharding in SHARDINGS:
            add(f"{sharding}-{dtype}", dtype=dtype, sharding=sharding)
    for sharding in SHARDINGS:
        add(f"{sharding}-experts", model="softmax", layout="ep2", sharding=sharding)
        add(f"{sharding}-first", sharding=sharding, before=0)
        add(f"{sharding}-in-parallel", sharding=sharding, parallel=True)
        add(f"{sharding}-asynchronous", sharding=sharding, asynchronous=True)
    add("plain-first", distributed=False, before=0)
    for distributed in (False, True):
        add(
            f"no-experts-{distributed}",
            model="softmax",
            layout="embedding_first",
            distributed=distributed,
            sharding=SHARDINGS[0],
        )
    for source, target in (("dp2", "tp2"), ("dp2", "pp2"), ("tp2", "dp2"), ("pp2_vp2", "tp2")):
        found.append(("continues_elsewhere", f"{source}-{target}", {"source": source, "target": target}))
    for sharding in SHARDINGS:
        found.append(("continues_alone", sharding, {"name": f"{sharding}-fp32", "sharding": sharding}))
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
