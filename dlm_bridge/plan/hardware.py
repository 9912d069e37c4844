"""Every constant that the models of memory and time rest on and that no formula gives, in one place to calibrate."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Overheads:
    """What a process takes besides the tensors that the formulas count.

    The reserved share is the caching allocator's slack over the peak of what is allocated (blocks of other sizes than
    asked for); the CUDA context with loaded kernels and each NCCL communicator's buffers lie outside of the allocator.
    `expert_imbalance`: the fullest rank's token copies over the mean's, dropless and with a young router. Loss: the
    engine's output layer works in pieces of `loss_chunk_bytes` of fp32 logits; `loss_chunk_copies` are alive at once
    (logits, their exponentials or gradients, and the bf16 product).
    """

    cuda_context: int = 600 * MIB
    nccl_group: int = 64 * MIB
    reserved_share: float = 0.03
    expert_imbalance: float = 1.25
    loss_chunk_bytes: int = 256 * MIB
    loss_chunk_copies: float = 2.5
    gradient_bytes: int = 4  # the engine reduces gradients in fp32


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and its network; rates in FLOP/s and bytes/s and direction, per GPU.

    The defaults are an H100 SXM of 80 GB with NVLink 4 and one 400 Gb/s port a GPU: data sheet rates. The efficiencies
    are what large kernels reach of them (a matrix product of `small_rows` rows reaches half of it); `layer_latency` is
    the time in seconds that launching one layer's forward kernels takes however small they are, `message_latency` that
    of one pipeline hand-over or collective.
    """

    memory: int = 80 * 10**9
    flops: float = 989e12
    nvlink: float = 450e9
    network: float = 50e9
    memory_bandwidth: float = 3.35e12
    per_node: int = 8
    matmul_efficiency: float = 0.6
    small_rows: int = 256
    attention_efficiency: float = 0.5
    expert_efficiency: float = 0.5
    link_efficiency: float = 0.75
    layer_latency: float = 3e-4
    message_latency: float = 3e-5

    def bandwidth(self, ranks: int) -> float:
        """Bytes/s that a group of neighbouring ranks moves per GPU: over NVLink inside a node, else the network."""
        return (self.nvlink if ranks <= self.per_node else self.network) * self.link_efficiency


OVERHEADS = Overheads()
