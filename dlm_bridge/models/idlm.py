"""I-DLM, Qwen3 adapted to predict several tokens at once causally: spec. Tensors and body are SDAR's.

Source: Introspective-Diffusion/I-DLM (training and SGLang code), arXiv 2604.11035, NeMo Automodel's recipe.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_bridge.models import sdar

SPEC = replace(
    sdar.SPEC,
    name="idlm",
    title="I-DLM",
    hub_ids=("yifanyu/I-DLM-8B", "yifanyu/I-DLM-32B"),
    architectures=(),  # SDAR's or Qwen3's: it is identified by `told_from`, or chosen by name
    told_from=("sdar", "use_regular_causal"),
    config_class="dlm_bridge.models.modeling_idlm:IDLMConfig",
    model_class="dlm_bridge.models.modeling_idlm:IDLMForCausalLM",
    attention_pattern="causal",
    shift=True,
    objective="idlm",
    sft={},
    sampler={"algorithm": "idlm"},
    checked_against="independent maths; its body is SDAR's with a causal mask",
)
