"""Subjects of the interop tests: tiny models, layouts, a batch of tokens, and paths of files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from dlm_bridge import Layout
from dlm_bridge.models.families import find_family
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder
from tests.families.case import BuildTensors, all_cases
from tests.interop.autoregressive import CONFIGS, tensors_of

BATCH, LENGTH, SEED = 2, 12, 1


@dataclass(frozen=True)
class Model:
    """One tiny checkpoint."""

    config: dict[str, Any]  # the Hub's config.json
    build: BuildTensors
    family: str | None = None  # if the config does not identify it
    length: int = LENGTH
    batch: int = BATCH

    @property
    def vocab(self) -> int:
        return self.config["vocab_size"]

    @property
    def has_experts(self) -> bool:
        return find_family(self.config, self.family).mapping.dims(self.config).experts > 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.build(self.config, SEED, torch.float32)

    def write(self, folder: Path) -> None:
        write_hub_folder(folder, self.config, self.tensors())

    def tokens(self) -> torch.Tensor:
        """input_ids [B, S]."""
        return torch.randint(0, self.vocab, (self.batch, self.length), generator=torch.Generator().manual_seed(5))

    def logit_weights(self) -> torch.Tensor:
        """[B, S, V]; sum(logits * weights) / B is the loss whose gradients are compared."""
        return torch.randn(self.batch, self.length, self.vocab, generator=torch.Generator().manual_seed(6))


# Grouped queries, a vocabulary that tp 2 does not divide, a tied output layer: wrong row orders and counts show.
LLADA: dict[str, dict[str, Any]] = {
    "gqa": {"n_kv_heads": 2},
    "odd_vocabulary": {"vocab_size": 125, "embedding_size": 125, "mask_token_id": 124},
    "tied": {"n_kv_heads": 2, "weight_tying": True, "vocab_size": 125, "embedding_size": 125, "mask_token_id": 124},
}

# Sequences of block-causal families contain whole blocks and a part of one. Mistral's sequence is longer than its
# window of 4096 tokens.
LONG = {"mistral_window": (4104, 1)}

REFUSED = ("olmoe",)  # families that megatron-core does not support; their weights can be converted
# The live model omits its multi-token prediction layer, so that megatron-core alone neither saves nor loads it.
PREDICTING = "glm4_moe_mtp"
# The live model's router selects experts per block, unlike megatron-core's; see tests/parallel/live_cases.py.
BLOCK_ROUTED = "llada2_moe-2.2"


@cache
def models() -> dict[str, Model]:
    """Every model, by name: LLaDA in three shapes, each other family, the autoregressive ones."""
    found = {name: Model(llada_config(torch_dtype="float32", **more), llada_tensors) for name, more in LLADA.items()}
    for case in all_cases():
        if case.name != "llada":
            config = {**case.config, **({"torch_dtype": "float32"} if "torch_dtype" in case.config else {})}
            length = LENGTH if case.block is None else 2 * case.block + case.block // 2
            found[case.id] = Model(config, case.tensors, case.family_argument, length)
    for name, config in CONFIGS.items():
        length, batch = LONG.get(name, (LENGTH, BATCH))
        found[name] = Model(config, partial(tensors_of), None, length, batch)
    return found


def families() -> list[str]:
    """Families that are compared in one or a few layouts."""
    left_out = {*LLADA, *REFUSED, PREDICTING, BLOCK_ROUTED}
    return [name for name in models() if name not in left_out]


LAYOUTS: dict[str, Layout] = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2_uneven": Layout(pp=2, first_stage=1),
    "pp2_string": Layout(pp=2, pipeline="E|ttttL"),  # a stage with only the embedding
    "pp2_vp2": Layout(pp=2, vp=2),
    "dp2": Layout(),
    "ep2": Layout(ep=2),
    "etp2": Layout(etp=2),  # experts are sharded, attention is not
    "tp2_ep2": Layout(tp=2, ep=2, etp=1),
}

# Layout of the imported checkpoint, always another than that of the model which loads it.
IMPORTED: dict[str, Layout] = {
    "tp2": Layout(tp=1, pp=4),
    "pp2": Layout(tp=2, pp=1),
    "pp2_vp2": Layout(tp=2, pp=2),
    "ep2": Layout(tp=2, pp=2),
}


def layout_of(name: str) -> str:
    """Layout of a family's comparison, which shards its particular parameters."""
    if name in LONG:
        return "pp2"
    return "ep2" if models()[name].has_experts else "tp2"


def imports(every: bool = False) -> list[tuple[str, str]]:
    """(model, layout) of imports that megatron-core loads. `every`: the rest."""
    of_llada = [(name, layout) for layout in ("tp2", "pp2", "pp2_vp2") for name in LLADA]
    first = [("odd_vocabulary", "tp2"), ("tied", "pp2"), ("gqa", "pp2_vp2")]
    if every:
        others = [(name, layout_of(name)) for name in families() if name not in SAVED]
        return [*(case for case in of_llada if case not in first), *others]
    return [*first, *((name, layout_of(name)) for name in SAVED)]


# All storage forms of experts, leading dense layers, shared experts, router biases, and all kinds of masks.
EXPERTS = ("llada_moe", "llada2_moe", "mixtral")
DENSE = ("phi3", "seed_oss", "smollm3")  # fused matrices, a window, biases, layers without rotary embedding
ALSO_ON_TWO_STAGES = ("sdar", "llada2_moe", "qwen3_moe")


# One family for each additional kind of parameter: norms of queries and keys, biases, latent attention, sinks.
SAVED = (*EXPERTS, "sdar", "qwen2", "deepseek_v3", "gpt_oss")


def saved(every: bool = False) -> list[tuple[str, str]]:
    """(model, layout) of checkpoints that megatron-core saves and `export` reads: padded at tp 2, tied over two stages
    at pp 2. `every`: the rest."""
    if every:
        others = [(name, layout_of(name)) for name in families() if name not in SAVED]
        return [("gqa", "tp2"), ("tied", "tp2"), *((name, "tp2_ep2") for name in EXPERTS[:-1]), *others]
    of_llada = [("gqa", "pp2"), ("odd_vocabulary", "tp2"), ("tied", "pp2")]
    return [*of_llada, *((name, layout_of(name)) for name in SAVED), (EXPERTS[-1], "tp2_ep2")]


Checks = dict[str, tuple[str, dict[str, Any]]]


def plan() -> Checks:
    """The checks of two processes in order: name -> function in `checks` and its arguments. Each claim with one model
    that shows it; `other_plan` repeats them with others."""
    return {name: check for name, check in _every_check().items() if _is_first(name)} | _disk_checks()


def other_plan() -> Checks:
    """The checks that `plan` leaves out."""
    checks = {name: check for name, check in _every_check().items() if not _is_first(name)}
    return checks | saves(every=True) | _refreshes(every=True) | loads(every=True)


# Every layout with one dense model and one with experts; the other kinds of parameters in the layout that cuts them.
FIRST = (
    *(f"gqa-{layout}" for layout in ("tp2", "pp2", "pp2_uneven", "pp2_string", "pp2_vp2", "dp2", "tp2-sp")),
    *(f"{EXPERTS[1]}-{layout}" for layout in ("tp2", "ep2", "etp2", "tp2_ep2", "ep2-alltoall")),
    *("odd_vocabulary-tp2", "tied-pp2", "sdar-tp2-sp", "qwen2-tp2-sp", "deepseek_v3-tp2", "phi3-tp2", "smollm3-pp2"),
    *("gpt_oss-tp2_ep2", "gpt_oss-ep2", "mixtral-ep2", f"{PREDICTING}-ep2", "sdar-pp2"),
)


def _is_first(name: str) -> bool:
    what, _, case = name.partition("[")
    if what in ("logits", "stream", "refresh"):
        return case[:-1] in FIRST
    if what == "gradients":
        return case[:-1] in FIRST and not case.startswith(("gpt_oss-ep2", "mixtral", f"{EXPERTS[1]}-tp2]"))
    return True


def _every_check() -> Checks:
    checks: Checks = {
        "platform": ("platform_is_reversible", {}),
        "one_process": ("one_process_without_torchrun", {}),
        "bad_input": ("bad_input_is_named", {}),
        "groups_of_today": ("sharded_tensors_know_the_groups_of_today", {}),
        "half_precision": ("half_precision_is_kept", {}),
        "mixed_dtypes": ("mixed_dtypes_need_a_choice", {}),
        "router_dtype": ("a_router_keeps_its_own_dtype", {}),
        "more_padding": ("more_padding_is_trimmed_by_role", {}),
        "wrapped": ("wrapped_models_are_unwrapped", {}),
        "reads": ("each_stage_reads_its_own_tensors", {}),
        "reads_experts": ("each_rank_reads_its_own_experts", {}),
        "optimizer_attributes": ("parameters_are_ready_for_the_optimizer", {}),
        "masks": ("a_mask_is_honoured", {}),
        "ignored_masks": ("an_ignored_mask_is_refused", {}),
        "expert_names": ("experts_have_global_names", {}),
        "refused_families": ("what_megatron_core_cannot_hold_is_refused", {}),
        "rope": ("rope_matches_beyond_the_original_context", {}),
        "logits[gqa-tp2-sp]": ("built_logits_match", {"model": "gqa", "layout": "tp2", "sequence_parallel": True}),
        "gradients[gqa-tp2-sp]": ("gradients_match", {"model": "gqa", "layout": "tp2", "sequence_parallel": True}),
    }
    for layout in ("tp2", "pp2", "pp2_uneven", "pp2_string", "pp2_vp2", "dp2"):
        for model in LLADA:
            case = {"model": model, "layout": layout}
            checks[f"logits[{model}-{layout}]"] = ("built_logits_match", case)
            checks[f"stream[{model}-{layout}]"] = ("streamed_weights_are_the_source", case)
    for layout in ("tp2", "pp2", "pp2_vp2"):
        checks[f"gradients[gqa-{layout}]"] = ("gradients_match", {"model": "gqa", "layout": layout})
        checks[f"bidirectional[{layout}]"] = ("last_token_moves_first_logit", {"layout": layout})
    return checks | _family_checks()


def _family_checks() -> Checks:
    """Checks of single families: QK norms with sequence parallelism, fused matrices, layers without rotary embedding
    on two stages, experts in every layout, masks per stage."""
    checks: Checks = {}
    for model in ("sdar", "qwen2"):
        case = {"model": model, "layout": "tp2", "sequence_parallel": True}
        checks[f"logits[{model}-tp2-sp]"] = ("built_logits_match", case)
        checks[f"gradients[{model}-tp2-sp]"] = ("gradients_match", case)
    for model in ("nemotron_labs_diffusion-beyond-context", "deepseek_v3"):
        for layout, overrides in (("tp2", {"sequence_parallel": True}), ("pp2", {})):
            case = {"model": model, "layout": layout, **overrides}
            checks[f"logits[{model}-{layout}]"] = ("built_logits_match", case)
            checks[f"gradients[{model}-{layout}]"] = ("gradients_match", case)
    for model, layout in (*((name, "tp2") for name in DENSE), ("phi3", "pp2"), ("smollm3", "pp2")):
        case = {"model": model, "layout": layout}
        checks[f"logits[{model}-{layout}]"] = ("built_logits_match", case)
        checks[f"stream[{model}-{layout}]"] = ("streamed_weights_are_the_source", case)
        if (model, layout) != ("smollm3", "pp2"):  # a trainer sums both stages' gradients of a tied matrix
            checks[f"gradients[{model}-{layout}]"] = ("gradients_match", case)
    for layout in ("ep2", "pp2", "tp2_ep2"):
        case = {"model": "gpt_oss", "layout": layout}
        checks[f"logits[gpt_oss-{layout}]"] = ("built_logits_match", case)
        checks[f"gradients[gpt_oss-{layout}]"] = ("gradients_match", case)
        checks[f"stream[gpt_oss-{layout}]"] = ("streamed_weights_are_the_source", case)
    for layout in ("ep2", "pp2"):
        case = {"model": PREDICTING, "layout": layout}
        checks[f"logits[{PREDICTING}-{layout}]"] = ("built_logits_match", case)
        checks[f"stream[{PREDICTING}-{layout}]"] = ("streamed_weights_are_the_source", case)
    for model in EXPERTS:
        case = {"model": model, "layout": "ep2", "moe_token_dispatcher_type": "alltoall"}
        checks[f"logits[{model}-ep2-alltoall]"] = ("built_logits_match", case)
        checks[f"gradients[{model}-ep2-alltoall]"] = ("gradients_match", case)
        for layout in ("tp2", "ep2", "etp2", "tp2_ep2"):
            case = {"model": model, "layout": layout}
            checks[f"logits[{model}-{layout}]"] = ("built_logits_match", case)
            checks[f"stream[{model}-{layout}]"] = ("streamed_weights_are_the_source", case)
            checks[f"gradients[{model}-{layout}]"] = ("gradients_match", case)
    for model in (*EXPERTS, PREDICTING, "gpt_oss"):
        checks[f"refresh[{model}-ep2]"] = ("changed_weights_refresh_the_hub_model", {"model": model, "layout": "ep2"})
    for model in ALSO_ON_TWO_STAGES:
        case = {"model": model, "layout": "pp2"}
        checks[f"logits[{model}-pp2]"] = ("built_logits_match", case)
        checks[f"stream[{model}-pp2]"] = ("streamed_weights_are_the_source", case)
    return checks


def saves(every: bool = False) -> Checks:
    """Checks that save the checkpoints of `saved`."""
    return {
        f"save[{model}-{layout}]": ("megatron_saves", {"model": model, "layout": layout})
        for model, layout in saved(every)
    }


def loads(every: bool = False) -> Checks:
    """Checks that load the checkpoints of `imports`."""
    return {
        f"load[{model}-{layout}]": ("imported_checkpoint_loads_strictly", {"model": model, "layout": layout})
        for model, layout in imports(every)
    }


def _refreshes(every: bool = False) -> Checks:
    return {
        f"refresh[{model}-{layout}]": ("changed_weights_refresh_the_hub_model", {"model": model, "layout": layout})
        for model, layout in saved(every)
        if model in LLADA
    }


def _disk_checks() -> Checks:
    return saves() | _refreshes() | loads()


def referenced(checks: Checks) -> set[str]:
    """Models whose logits and gradients the checks are compared with."""
    named = {case["model"] for _, case in checks.values() if "model" in case}
    return {name for name in named if name not in REFUSED}


class Files:
    """Paths below the folder that the tests and the two processes share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def hub(self, model: str) -> Path:
        return self.root / "hub" / model

    def imported(self, model: str, layout: str) -> Path:
        return self.root / "imported" / f"{model}_{layout}"

    def saved(self, model: str, layout: str) -> Path:
        """Checkpoint saved by megatron-core."""
        return self.root / "saved" / f"{model}_{layout}"

    def reference(self, model: str) -> Path:
        """The Hub-side model's logits and gradients."""
        return self.root / f"reference_{model}.pt"
