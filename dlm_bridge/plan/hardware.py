"""GPUs by name, and the rates and efficiencies that the estimates of time rest on."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_bridge.settings import check_choice


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and its network; rates in FLOP/s, and in bytes/s per direction, per GPU.

    The defaults are the data sheet rates of an 80 GB H100 SXM with NVLink 4 and one 400 Gb/s port per GPU. The
    efficiencies are the fractions that kernels were measured to sustain on one H200 (docs/planning.md): a large matrix
    product 654 of 989 TFLOP/s under the power limit (one of `small_rows` rows half of that), attention 550 to 700,
    memory 4.36 of 4.8 TB/s. `overlap_efficiency`, the part of a communication that computation hides where the run
    overlaps the two, is one that fits published runs. `layer_latency` is the time in seconds to launch one layer's
    forward kernels, `message_latency` that of one pipeline message or collective.
    """

    memory: int = 80 * 10**9
    flops: float = 989e12
    nvlink: float = 450e9
    network: float = 50e9
    memory_bandwidth: float = 3.35e12
    per_node: int = 8
    matmul_efficiency: float = 0.66
    small_rows: int = 256
    attention_efficiency: float = 0.6
    memory_efficiency: float = 0.91
    expert_efficiency: float = 0.5
    link_efficiency: float = 0.75
    overlap_efficiency: float = 0.5
    layer_latency: float = 3e-4
    message_latency: float = 3e-5

    def bandwidth(self, ranks: int) -> float:
        """Bytes/s per GPU of a group of neighbouring ranks: NVLink inside a node, else the network."""
        return (self.nvlink if ranks <= self.per_node else self.network) * self.link_efficiency

    @property
    def memory_rate(self) -> float:
        """Bytes/s that kernels read and write."""
        return self.memory_bandwidth * self.memory_efficiency

    def assumptions(self) -> list[str]:
        """Assumptions of every estimated time, one sentence each."""
        return [
            f"a GPU: {self.flops / 1e12:.0f} TFLOP/s in bf16 and twice that in FP8, of which matrix products sustain "
            f"{self.matmul_efficiency:.0%}, experts' {self.expert_efficiency:.0%}, attention (never in FP8) "
            f"{self.attention_efficiency:.0%}; memory {self.memory_bandwidth / 1e12:.2f} TB/s, of which "
            f"{self.memory_efficiency:.0%}",
            f"links: NVLink {self.nvlink / 1e9:.0f} GB/s among {self.per_node} GPUs, network {self.network / 1e9:.0f} "
            f"GB/s a GPU whatever the number of nodes, of which {self.link_efficiency:.0%}; "
            f"{1e6 * self.message_latency:.0f} us a message or collective",
            "tensor and expert parallel collectives do not overlap with computation (with tp_overlap and ep_overlap "
            f"{self.overlap_efficiency:.0%} of them do); at most 90% of data-parallel communication overlaps with the "
            "last micro-batch, and at most 90% of context-parallel communication with attention",
            "the pipeline's bubble is (pp - 1) / (vp x micro-batches) of the slowest stage's work",
            "no failure, no slow GPU, no checkpoint, no waiting for data",
        ]


# Per GPU, from NVIDIA's data sheets: memory, dense bf16 FLOP/s (half of the figure with sparsity), memory bandwidth,
# and NVLink's rate per direction (half of the total). "A100 Tensor Core GPU" (June 2021, SXM), "H100" and "H200 Tensor
# Core GPU" (SXM), "DGX B200" (an eighth of the system), "L40S" (PCIe 4.0 x16, no NVLink). The network is the port per
# GPU of DGX A100 (200 Gb/s), DGX H100, H200 and B200 (400 Gb/s); the L40S has none of its own, so it has the default.
GPUS = {
    "A100": Hardware(80 * 10**9, 312e12, 300e9, 25e9, 2.039e12),
    "A100-40GB": Hardware(40 * 10**9, 312e12, 300e9, 25e9, 1.555e12),
    "H100": Hardware(80 * 10**9, 989e12, 450e9, 50e9, 3.35e12),
    "H200": Hardware(141 * 10**9, 989e12, 450e9, 50e9, 4.8e12),
    "B200": Hardware(180 * 10**9, 2250e12, 900e9, 50e9, 8e12),
    "L40S": Hardware(48 * 10**9, 362e12, 32e9, 50e9, 0.864e12),
}


def find_gpu(name: str) -> Hardware:
    """Data sheet rates of a GPU by name, in any case. Raises SettingError that names the nearest known one."""
    word = name.upper().removeprefix("NVIDIA").strip(" -_").replace(" ", "-").replace("_", "-")
    if word.removesuffix("-80GB") in GPUS:
        word = word.removesuffix("-80GB")
    others = "`gpu_memory`, `gpu_tflops`, `memory_bandwidth`, `nvlink` and `network`"
    check_choice("gpu", word if word in GPUS else name.upper(), GPUS, f", or describe another with {others}")
    return GPUS[word]
