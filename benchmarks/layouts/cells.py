"""What one_step.py compares: layouts, small models with their objectives, and the result of each pair (a cell)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    hidden: int
    ffn: int
    heads: int
    groups: int
    length: int
    block: int
    vocab: int


ON_GPU = Size(hidden=256, ffn=512, heads=8, groups=4, length=256, block=32, vocab=509)  # tp 2 has to pad it
ON_CPU = Size(hidden=64, ffn=96, heads=8, groups=4, length=32, block=4, vocab=109)
YARN: dict[str, Any] = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LAYERS, EXPERTS, BATCH, MICRO = 4, 8, 16, 2


@dataclass(frozen=True)
class Task:
    """A model, its objective and its rows."""

    model: str
    objective: str
    packed: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.objective}{' packed' if self.packed else ''}"

    @property
    def has_experts(self) -> bool:
        return self.model in (*MOE, LATENT)


DENSE = {"llada": "masked", "sdar": "block", "dream": "shifted", "qwen3": "causal"}
MOE = {"llada_moe": "masked", "sdar_moe": "block", "rnd1": "shifted", "qwen3_moe": "causal"}
DENSE_TASKS = [Task(*pair) for pair in DENSE.items()] + [Task("llada", "masked", True), Task("qwen3", "causal", True)]
MOE_TASKS = [*(Task(*pair) for pair in MOE.items()), Task("llada_moe", "masked", True)]
EVERYTHING = [*DENSE_TASKS, *MOE_TASKS]
SCALED, LATENT = "nemotron", "deepseek_v3"  # queries that grow with their position; latent attention, with experts
OWN_ATTENTION = [
    Task(SCALED, "nemotron"),
    Task(SCALED, "masked", True),
    *(Task(LATENT, "causal", p) for p in (False, True)),
]
SOME = [Task("llada", "masked"), Task("sdar", "block"), Task("qwen3", "causal"), Task("llada_moe", "masked")]
FEW = [Task("llada", "masked"), Task("llada_moe", "masked")]
OVERLAPPED = [
    Task("llada", "masked"),
    Task("sdar", "block"),
    Task("qwen3", "causal", True),
    Task("llada_moe", "masked"),
]


@dataclass(frozen=True)
class Layout:
    """What is asked of the engine; `ranks` is the fewest that show it."""

    name: str
    ranks: int
    flags: dict[str, Any]
    tasks: list[Task] = field(default_factory=lambda: EVERYTHING)


@dataclass
class Cell:
    """One line of the table."""

    layout: str
    ranks: int
    task: str
    precision: str
    result: str = "not run"  # equal, differs, refused, error, not run
    loss: float | None = None  # relative
    gradient: float | None = None  # of the worst weight, relative to how far its farthest element moved
    tolerance: tuple[float, float] | None = None  # of the loss; of the gradient, or in bf16 of from_fp32's share
    # In bf16, root mean squares relative to how far a weight moves in fp32; of the worst weight:
    from_fp32: float | None = None  # how far the layout is from fp32,
    alone_from_fp32: float | None = None  # one process is,
    farther: float | None = None  # and the layout is as a multiple of one process, the same weight in both
    worst: str = ""
    said: str = ""
    seconds: float = 0.0


def layouts() -> list[Layout]:
    sharded = {f"fsdp {name}": {"fsdp": name} for name in ("optim", "optim_grads", "optim_grads_params")}
    tp = {"tp": 2}
    experts = {"ep": 2}
    full = {"fsdp": "optim_grads_params"}
    two = {"optimizer_instances": 2}
    found = [
        Layout("dp, plain optimizer", 2, {"distributed_optimizer": False}, SOME),
        Layout("dp, distributed optimizer", 2, {}),
        Layout("dp, no overlap", 2, {"overlap_communication": False}, FEW),
        Layout("dp, two optimizer instances", 4, two, SOME),
        Layout("tp2, no sp", 2, {**tp, "sequence_parallel": False}, DENSE_TASKS),
        Layout("tp2 + sp", 2, tp, [*EVERYTHING, *OWN_ATTENTION]),
        Layout("tp2 + sp, userbuffers", 2, {**tp, "tp_overlap": True}, OVERLAPPED),
        Layout("pp2", 2, {"pp": 2}, [*EVERYTHING, *OWN_ATTENTION]),
        Layout("pp2 x vp2", 2, {"pp": 2, "vp": 2}),
        Layout("tp2 + sp x pp2", 4, {**tp, "pp": 2}, SOME),
        Layout("ep2, alltoall", 2, experts, [*MOE_TASKS, Task(LATENT, "causal")]),
        Layout("ep2, allgather", 2, {**experts, "moe_dispatcher": "allgather"}, MOE_TASKS),
        Layout("ep2, two micro-batches at a time", 2, {**experts, "ep_overlap": True}, MOE_TASKS),
        Layout("ep4", 4, {"ep": 4}, MOE_TASKS),
        Layout("tp2 + sp, ep2 x etp1", 2, {**tp, **experts, "etp": 1}, MOE_TASKS),
        Layout("tp2 + sp, ep2 x etp2", 4, {**tp, **experts, "etp": 2}, MOE_TASKS),
        Layout("etp2", 2, {"etp": 2}, MOE_TASKS),
        Layout("ep2 x pp2", 4, {**experts, "pp": 2}, MOE_TASKS),
        Layout(
            "ep2 x pp2 x vp2, two micro-batches at a time",
            4,
            {**experts, "pp": 2, "vp": 2, "ep_overlap": True},
            [Task("llada_moe", "masked")],
        ),
    ]
    for comm in ("p2p", "a2a", "allgather"):
        found.append(Layout(f"cp2 {comm}", 2, {"cp": 2, "cp_comm_type": comm}, [*EVERYTHING, *OWN_ATTENTION]))
        found.append(Layout(f"cp4 {comm}", 4, {"cp": 4, "cp_comm_type": comm}, SOME))
    found += [
        Layout(
            "cp4 a2a+p2p (2, 2)", 4, {"cp": 4, "cp_comm_type": "a2a+p2p", "hierarchical_cp_sizes": "2,2"}, EVERYTHING
        ),
        Layout("cp2 p2p x tp2 + sp", 4, {"cp": 2, **tp}, SOME),
        Layout("cp2 p2p x pp2", 4, {"cp": 2, "pp": 2}, SOME),
        Layout("cp2 p2p x ep2", 4, {"cp": 2, **experts}, MOE_TASKS),
        *(Layout(name, 2, flags, [*SOME, Task("sdar_moe", "block")]) for name, flags in sharded.items()),
        Layout("fsdp optim_grads, two instances", 4, {"fsdp": "optim_grads", **two}, FEW),
        Layout("fsdp optim_grads_params, two instances", 4, {**full, **two}, FEW),
        Layout("fsdp optim_grads_params x tp2 + sp", 4, {**full, **tp}, SOME),
        Layout("fsdp optim_grads_params x cp2", 4, {**full, "cp": 2}, SOME),
        Layout("fsdp optim_grads_params x ep2", 2, {**full, **experts}, MOE_TASKS),
        Layout("fsdp optim_grads_params x pp2", 2, {**full, "pp": 2}, FEW),
    ]
    return found


def model_config(model: str, size: Size) -> dict[str, Any]:
    """A config.json, small."""
    mask = size.vocab - 1
    if model == "llada":
        return {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "activation_type": "silu",
            "alibi": False,
            "attention_layer_norm": False,
            "bias_for_layer_norm": False,
            "block_group_size": 1,
            "block_type": "llama",
            "d_model": size.hidden,
            "embedding_size": size.vocab,
            "include_bias": False,
            "include_qkv_bias": False,
            "init_fn": "mitchell",
            "init_std": 0.02,
            "input_emb_norm": False,
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "mask_token_id": mask,
            "max_sequence_length": 4096,
            "mlp_hidden_size": size.ffn,
            "n_heads": size.heads,
            "n_kv_heads": size.groups,
            "n_layers": LAYERS,
            "rms_norm_eps": 1e-5,
            "rope": True,
            "rope_full_precision": True,
            "rope_theta": 500000.0,
            "scale_logits": False,
            "torch_dtype": "float32",
            "vocab_size": size.vocab,
            "weight_tying": False,
        }
    shared: dict[str, Any] = {
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups,
        "num_hidden_layers": LAYERS,
        "head_dim": size.hidden // size.heads,
        "vocab_size": size.vocab,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": model == "dream",  # one of them
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    diffusion = {"mask_token_id": mask}
    experts = {
        "moe_intermediate_size": size.ffn // 4,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
    }
    blocks = {"block_size": size.block}
    own: dict[str, dict[str, Any]] = {
        "sdar": {"architectures": ["SDARForCausalLM"], "model_type": "sdar", **diffusion, **blocks},
        "dream": {"architectures": ["DreamModel"], "model_type": "Dream", **diffusion},
        "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        "llada_moe": {
            "architectures": ["LLaDAMoEModelLM"],
            "model_type": "llada",
            "dense_intermediate_size": size.ffn,
            "expert_intermediate_size": size.ffn // 4,
            "moe_layer_freq": [1] * LAYERS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": None,
            "partial_rotary_factor": 1,
            "qk_layernorm": True,
            "router_aux_loss_coef": 0.01,
            "shared_expert_intermediate_size": None,
            **diffusion,
        },
        "sdar_moe": {
            "architectures": ["SDARMoeForCausalLM"],
            "model_type": "sdar_moe",
            **diffusion,
            **experts,
            **blocks,
        },
        "rnd1": {"architectures": ["RND1LM"], "model_type": "rnd1", **diffusion, **experts},
        "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **experts},
        SCALED: {
            "architectures": ["NemotronLabsDiffusionModel"],
            "model_type": "nemotron_labs_diffusion",
            "dlm_paradigm": "bidirectional",
            "mlp_bias": False,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e6,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": size.length // 8,
            },
            **diffusion,
            **blocks,
        },
        LATENT: {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": size.heads,
            "head_dim": 64,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": size.ffn // 4,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "num_nextn_predict_layers": 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_theta": 10000,
            "rope_scaling": {**YARN, "factor": 40, "original_max_position_embeddings": 4096},
        },
    }
    return {**shared, **own[model]}
