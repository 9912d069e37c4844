"""The published samplers by name; `register_algorithm` adds others. A sampler is a dataclass of its parameters."""

from __future__ import annotations

from dlm_bridge.generation.algorithms.base import Algorithm
from dlm_bridge.generation.algorithms.block_causal import SDAR, LLaDA2, LLaDA21
from dlm_bridge.generation.algorithms.difflm import DiffLM
from dlm_bridge.generation.algorithms.dllm import BD3LM, MDLM
from dlm_bridge.generation.algorithms.dream import DiffuLLaMA, Dream
from dlm_bridge.generation.algorithms.fast_dllm_v2 import FastDLLMv2
from dlm_bridge.generation.algorithms.llada import ILLaDA, LLaDA
from dlm_bridge.generation.algorithms.nemotron import LinearSpec, Nemotron
from dlm_bridge.generation.algorithms.rnd1 import RND1
from dlm_bridge.generation.algorithms.uniform import Uniform
from dlm_bridge.generation.algorithms.wedlm import WeDLM

_ALL: tuple[type[Algorithm], ...] = (
    LLaDA, DiffLM, ILLaDA, MDLM, BD3LM, Dream, DiffuLLaMA, RND1, SDAR, LLaDA2, LLaDA21, FastDLLMv2, Nemotron,
    LinearSpec, WeDLM, Uniform,
)  # fmt: skip
ALGORITHMS: dict[str, type[Algorithm]] = {algorithm.name: algorithm for algorithm in _ALL}

__all__ = ["ALGORITHMS", "Algorithm"]
