"""DiffuLLaMA, Llama-2 adapted to diffusion: spec, mapping. Its config.json is Llama's.

Source: HKUNLP/DiffuLLaMA (model.py, inf_diffullama.py, the training code), arXiv 2410.17891.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

MAPPING = dense_mapping({})


SPEC = FamilySpec(
    name="diffullama",
    title="DiffuLLaMA",
    hub_ids=("diffusionfamily/diffullama",),
    architectures=(),  # Llama's: it is chosen by family="diffullama"
    model_type="llama",
    config_class="dlm_bridge.models.modeling_diffullama:DiffuLLaMAConfig",
    model_class="dlm_bridge.models.modeling_diffullama:LlamaForCausalLM",
    mapping=MAPPING,
    auto_classes=(),  # Llama's model type is registered already
    shift=True,
    mask_token_id=811,
    ordinary_mask=True,  # "an existing word" of Llama 2's vocabulary, says the paper
    objective="shifted_floor",
    sampler={"algorithm": "diffullama"},
    checked_against="the public DiscreteDiffusionModel of DiffuLLaMA",
)
