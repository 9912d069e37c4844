"""Published samplers that are not the default of any family."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "extra_samplers",
    samplers={
        "bd3lm": "dlm_bridge.extra_samplers.bd3lm:BD3LMSampler",
        "dmax": "dlm_bridge.extra_samplers.dmax:DMaxSampler",
        "dream_block": "dlm_bridge.extra_samplers.dream_block:DreamBlockSampler",
        "llada2.1": "dlm_bridge.extra_samplers.llada21:LLaDA21Sampler",
        "linear_spec": "dlm_bridge.extra_samplers.linear_spec:LinearSpecSampler",
        "hierarchical": "dlm_bridge.extra_samplers.hierarchical:HierarchicalSampler",
        "multi_bd": "dlm_bridge.extra_samplers.multi_bd:MultiBDSampler",
        "multi_block": "dlm_bridge.extra_samplers.multi_block:MultiBlockSampler",
        "wino": "dlm_bridge.extra_samplers.wino:WINOSampler",
        "credit": "dlm_bridge.extra_samplers.credit:CreditSampler",
    },
)
