"""The published samplers by name."""

from __future__ import annotations

from dlm_bridge.generation.samplers.base import Sampler
from dlm_bridge.generation.samplers.bd3lm import BD3LMSampler
from dlm_bridge.generation.samplers.difflm import DiffLMSampler
from dlm_bridge.generation.samplers.diffullama import DiffuLLaMASampler
from dlm_bridge.generation.samplers.dream import DreamSampler
from dlm_bridge.generation.samplers.fast_dllm_v2 import FastDLLMv2Sampler
from dlm_bridge.generation.samplers.illada import ILLaDASampler
from dlm_bridge.generation.samplers.linear_spec import LinearSpecSampler
from dlm_bridge.generation.samplers.llada import LLaDASampler
from dlm_bridge.generation.samplers.llada2 import LLaDA2Sampler
from dlm_bridge.generation.samplers.llada21 import LLaDA21Sampler
from dlm_bridge.generation.samplers.mdlm import MDLMSampler
from dlm_bridge.generation.samplers.nemotron import NemotronSampler
from dlm_bridge.generation.samplers.rnd1 import RND1Sampler
from dlm_bridge.generation.samplers.sdar import SDARSampler
from dlm_bridge.generation.samplers.uniform import UniformSampler
from dlm_bridge.generation.samplers.wedlm import WeDLMSampler

_ALL: tuple[type[Sampler], ...] = (
    LLaDASampler, DiffLMSampler, ILLaDASampler, MDLMSampler, BD3LMSampler, DreamSampler, DiffuLLaMASampler, RND1Sampler, SDARSampler, LLaDA2Sampler, LLaDA21Sampler, FastDLLMv2Sampler, NemotronSampler,
    LinearSpecSampler, WeDLMSampler, UniformSampler,
)  # fmt: skip
SAMPLERS: dict[str, type[Sampler]] = {algorithm.name: algorithm for algorithm in _ALL}

__all__ = ["SAMPLERS", "Sampler"]
