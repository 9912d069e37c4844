"""Specs of the diffusion forms of autoregressive families, the targets of `convert-to-dlm`.

Each family has six forms: bidirectional and block-causal, both also with shifted logits (the latter Fast-dLLM v2's),
I-DLM's, which stays causal and predicts the masks after a token, and Nemotron-Labs-Diffusion's, which denoises blocks
after a causal context.
Tensors, mapping and body are those of the autoregressive family; `modeling_derived` creates the classes. A published
family with the same form (`PUBLISHED`) replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlm_bridge.models import autoregressive, autoregressive_dense, bailing_moe, deepseek_v3, glm4_moe, gpt_oss
from dlm_bridge.models.families import FamilySpec

BODIES = (
    autoregressive.LLAMA,
    autoregressive.QWEN2,
    autoregressive.QWEN3,
    autoregressive.MISTRAL,
    autoregressive.QWEN3_MOE,
    autoregressive.MIXTRAL,
    glm4_moe.SPEC,
    autoregressive.OLMOE,
    deepseek_v3.SPEC,
    bailing_moe.SPEC,
    gpt_oss.SPEC,
    autoregressive_dense.SEED_OSS,
    autoregressive_dense.SMOLLM3,
    autoregressive_dense.PHI3,
    autoregressive_dense.GRANITE,
    autoregressive_dense.OLMO2,
    autoregressive_dense.OLMO3,
    autoregressive_dense.GEMMA2,
    autoregressive_dense.GEMMA3,
)


@dataclass(frozen=True)
class Form:
    """Diffusion form of a body. `word`: its name on the command line; `suffix`: of its class names."""

    word: str
    suffix: str
    fields: dict[str, Any] = field(default_factory=dict)  # fields of FamilySpec

    @property
    def name(self) -> str:
        return self.word.replace("-", "_")


FORMS = (  # the first is the default of convert-to-dlm
    Form(
        "idlm",
        "IntrospectiveLM",
        {"attention_pattern": "causal", "shift": True, "objective": "idlm", "sampler": {"algorithm": "idlm"}},
    ),
    Form(
        "block-causal",
        "BlockCausalLM",
        {
            "attention_pattern": "block_causal",
            "objective": "block",
            "sft": {"eos_padding": "block"},
            "sampler": {"algorithm": "sdar"},
        },
    ),
    Form(
        "bidirectional",
        "BidirectionalLM",
        {"objective": "masked", "sft": {"eos_padding": "row"}, "sampler": {"algorithm": "mdlm"}},
    ),
    Form(
        "shifted",
        "ShiftedLM",
        {"shift": True, "objective": "shifted", "sft": {"eos_padding": "row"}, "sampler": {"algorithm": "dream"}},
    ),
    Form(
        "block-causal-shifted",
        "BlockCausalShiftedLM",
        {
            "attention_pattern": "block_causal",
            "shift": True,
            "objective": "block_complementary",
            "sft": {"eos_padding": "block"},
            "sampler": {"algorithm": "fast_dllm_v2", "threshold": 0.9},
        },
    ),
    Form("nemotron", "HybridLM", {"objective": "nemotron", "sampler": {"algorithm": "nemotron"}}),
)

# Published families with the tensors of an autoregressive family, by form.
PUBLISHED: dict[str, dict[str, str]] = {
    "llama": {"bidirectional": "a2d_llama"},
    "qwen2": {"bidirectional": "a2d_qwen2", "block-causal-shifted": "fast_dllm_v2"},
    "qwen3": {"bidirectional": "a2d_qwen3", "block-causal": "sdar", "idlm": "idlm"},
    "qwen3_moe": {"shifted": "rnd1", "block-causal": "sdar_moe"},
    "bailing_moe_v2": {"block-causal": "llada2_moe"},
}


def forms_of(family: FamilySpec) -> dict[str, str]:
    """Names of the diffusion families with the body of an autoregressive one, by form; the default form first."""
    published = PUBLISHED.get(family.name, {})
    return {form.word: published.get(form.word, f"{family.name}_{form.name}") for form in FORMS}


def _derived(body: FamilySpec, form: Form) -> FamilySpec:
    prefix = body.architectures[0].removesuffix("ForCausalLM")
    module = "dlm_bridge.models.modeling_derived"
    return FamilySpec(
        name=f"{body.name}_{form.name}",
        title=f"{body.title.removesuffix(' (Hub side only)')}, {form.word}",
        hub_ids=(),
        architectures=(prefix + form.suffix,),
        model_type=f"{body.name}_{form.name}",
        config_class=f"{module}:{prefix}{form.suffix.removesuffix('LM')}Config",
        model_class=f"{module}:{prefix}{form.suffix}",
        mapping=body.mapping,
        initialisation=body.initialisation,
        derived_from=body.name,
        form=form.name,
        lora_targets=body.lora_targets,
        # All published gpt-oss models have sliding windows, which are causal and over one stream in megatron-core.
        training=("accelerate",) if body is gpt_oss.SPEC else body.training,
        checked_against=f"{body.checked_against}, under a causal mask",
        **form.fields,
    )


SPECS = tuple(
    _derived(body, form) for body in BODIES for form in FORMS if form.word not in PUBLISHED.get(body.name, {})
)
