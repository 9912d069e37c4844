"""What the sampling benchmarks compare with: the published loop, Fast-dLLM v1 and a roofline; the models' shapes."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import dlm_bridge  # noqa: F401

KERNELS = 25  # so many of a profile are printed
ROWS = 8  # of a batch whose tokens Fast-dLLM's code chooses at once: it writes all probabilities in float64, twice


def llada_sizes(width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int) -> dict[str, Any]:
    return {
        "d_model": width,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "mlp_hidden_size": mlp,
        "vocab_size": vocabulary,
        "embedding_size": vocabulary,
        "mask_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 2,
        "pad_token_id": vocabulary - 2,
        "max_sequence_length": 4096,
        "init_std": 1.28 / width**0.5,  # 0.02 at LLaDA's width: layers turn positions into different predictions
    }


# Family and config of each shape: LLaDA's body in the sizes of SmolLM2-135M, SmolLM2-1.7B and LLaDA-8B, SDAR-4B, and
# LLaDA2.0-mini (16B-A1.4B), whose sizes are the family's defaults.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llada", llada_sizes(64, 2, 4, 2, 128, 512)),
    "135m": ("llada", llada_sizes(576, 30, 9, 3, 1536, 49152)),
    "1.7b": ("llada", llada_sizes(2048, 24, 32, 32, 8192, 49152)),
    "8b": ("llada", llada_sizes(4096, 32, 32, 32, 12288, 126464)),
    "sdar-tiny": (
        "sdar",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 1024,
            "mask_token_id": 1000,
        },
    ),
    "sdar-4b": (
        "sdar",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
        },
    ),
    "llada2-tiny": (
        "llada2_moe",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "block_size": 8,
            "mask_token_id": 511,
            "eos_token_id": 510,
            "pad_token_id": 510,
        },
    ),
    "llada2-mini": ("llada2_moe", {}),
}


def random_model(config: Any, device: str) -> Any:
    """A model of this configuration with random weights in bf16. The output layer never prefers the mask token: the
    published loops do not expect that."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if not config.tie_word_embeddings:
        with torch.no_grad():
            model.lm_head.weight[config.mask_token_id] = 0
    return model


def model_of_shape(shape: str, device: str) -> Any:
    """The shape's model with random weights."""
    from transformers import AutoConfig

    family, sizes = SHAPES[shape]
    return random_model(AutoConfig.for_model(family, **sizes), device)


@torch.no_grad()
def published_loop(
    model: Any,
    prompt: torch.Tensor,
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    real: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """LLaDA's sampler as it is published (arXiv 2502.09992, algorithm 5), on transformers' own layers, step by step.

    Each step asks for the logits of every position, ranks what is masked up to the block's end, and commits each row's
    share. Yields the canvas after each forward pass.

    Args:
        real: [B, L], the attention mask of a prompt that is padded on the left.
    """
    mask, width = model.config.mask_token_id, prompt.shape[1]
    tokens = torch.nn.functional.pad(prompt, (0, gen_length), value=mask)
    given = {}
    if real is not None:
        attended = torch.nn.functional.pad(real, (0, gen_length), value=1)
        given = {"attention_mask": attended, "position_ids": (attended.cumsum(dim=1) - 1).clamp(min=0)}
    blocks = gen_length // block_length
    for block in range(blocks):
        end = width + (block + 1) * block_length
        for _ in range(steps // blocks):
            logits = model(tokens, **given).logits
            proposed = logits.argmax(dim=-1)
            confidence = logits.softmax(dim=-1).gather(-1, proposed[..., None])[..., 0]
            confidence = confidence.masked_fill(tokens != mask, -torch.inf)
            confidence[:, end:] = -torch.inf
            for row in range(len(tokens)):
                picked = confidence[row].topk(gen_length // steps).indices
                tokens[row, picked] = proposed[row, picked]
            yield tokens


class FastDLLM:
    """Fast-dLLM v1's own LLaDA with our model's very weights, and its sampler with a dual cache.

    Args:
        checkout: of NVlabs/Fast-dLLM.
    """

    def __init__(self, checkout: Path, model: Any) -> None:
        sys.path.insert(0, str(checkout / "llada"))
        import generate as code  # type: ignore[import-not-found]
        from model.configurationllada_sizes import LLaDAConfig  # type: ignore[import-not-found]
        from model.modelingllada_sizes import LLaDAModelLM  # type: ignore[import-not-found]

        ours = model.config
        config = LLaDAConfig(
            d_model=ours.d_model,
            n_heads=ours.n_heads,
            n_kv_heads=ours.num_key_value_heads,
            n_layers=ours.n_layers,
            mlp_hidden_size=ours.mlp_hidden_size,
            vocab_size=ours.vocab_size,
            embedding_size=ours.vocab_size,
            max_sequence_length=ours.max_sequence_length,
            rope_theta=ours.rope_theta if hasattr(ours, "rope_theta") else 500000.0,
            activation_type="silu",
            block_type="llama",
            layer_norm_type="rms",
            rms_norm_eps=ours.rms_norm_eps,
            rope=True,
            alibi=False,
            weight_tying=False,
            include_bias=False,
            include_qkv_bias=False,
            bias_for_layer_norm=False,
            attention_layer_norm=False,
            attention_dropout=0.0,
            residual_dropout=0.0,
            embedding_dropout=0.0,
            init_device="meta",
            mask_token_id=ours.mask_token_id,
        )
        with torch.device("meta"):
            peer = LLaDAModelLM(config)
        names = {
            "model.embed_tokens.": "model.transformer.wte.",
            "model.norm.": "model.transformer.ln_f.",
            "lm_head.": "model.transformer.ff_out.",
            "model.layers.": "model.transformer.blocks.",
            "self_attn.o_proj": "attn_out",
            "self_attn.": "",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ff_norm",
            "mlp.gate_proj": "ff_proj",
            "mlp.up_proj": "up_proj",
            "mlp.down_proj": "ff_out",
        }
        weights = {}
        for name, tensor in model.state_dict().items():
            for old, new in names.items():
                name = name.replace(old, new)
            weights[name] = tensor
        peer.load_state_dict(weights, assign=True)
        self._code = code
        self._model = peer.eval()
        self._mask = ours.mask_token_id

    @torch.no_grad()
    def generate(
        self, prompt: torch.Tensor, *, gen_length: int, block_length: int, steps: int, threshold: float | None = None
    ) -> tuple[torch.Tensor, int]:
        """The canvas, and the number of forward passes. Its `generate_with_dual_cache` takes one row; for several
        rows of one length its forward passes and its `get_transfer_index` run in the same order.

        Args:
            threshold: confidence from which on tokens are committed; `steps` has no effect then.
        """
        if len(prompt) == 1:
            arguments: dict[str, Any] = {"gen_length": gen_length, "block_length": block_length, "steps": steps}
            arguments |= {"mask_id": self._mask, "threshold": threshold}
            tokens, forwards = self._code.generate_with_dual_cache(self._model, prompt, **arguments)
            return tokens, forwards
        model, forwards = self._model, 0
        tokens = torch.nn.functional.pad(prompt, (0, gen_length), value=self._mask)
        share = None
        if threshold is None:
            share = torch.full((len(prompt),), gen_length // steps, device=prompt.device)
        for start in range(prompt.shape[1], tokens.shape[1], block_length):
            block = slice(start, start + block_length)
            output = model(tokens, use_cache=True)
            masked = tokens == self._mask
            masked[:, block.stop :] = False
            self._commit(output.logits, masked, tokens, share, threshold)
            forwards += 1
            replaced = torch.zeros_like(tokens[:1], dtype=torch.bool)  # the columns, which all rows share
            replaced[:, block] = True
            cached = {"past_key_values": output.past_key_values, "use_cache": True, "replace_position": replaced}
            while True:
                current = tokens[:, block]
                logits = model(current, **cached).logits
                self._commit(logits, current == self._mask, current, share, threshold)
                forwards += 1
                if not (current == self._mask).any():
                    break
        return tokens, forwards

    def _commit(
        self,
        logits: torch.Tensor,
        masked: torch.Tensor,
        tokens: torch.Tensor,
        share: torch.Tensor | None,
        threshold: float | None,
    ) -> None:
        for start in range(0, len(tokens), ROWS):
            part = slice(start, start + ROWS)
            arguments = (masked[part], tokens[part], None if share is None else share[part], threshold)
            proposed, picked = self._code.get_transfer_index(logits[part], 0.0, "low_confidence", *arguments)
            tokens[part][picked] = proposed[picked]


def ceilings(device: str) -> tuple[float, float, float]:
    """What this machine reaches: FLOP/s of a large bf16 product in the first moments, and after seconds of it, when a
    GPU has come to the clock that its power allows; and bytes/s that it reads."""
    size = 8192 if device == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    data = torch.zeros(2**30 if device == "cuda" else 2**20, device=device, dtype=torch.int32)

    def seconds(call: Callable[[], Any], lasting: float) -> list[float]:
        """Of one call, again and again for that long."""
        call()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 10 or time.perf_counter() - began < lasting:
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(4):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / 4)
        return times

    reading = statistics.median(seconds(data.max, 0))
    products = seconds(lambda: a @ b, 2.0)
    first, last = (statistics.median(times) for times in (products[:10], products[len(products) // 2 :]))
    return 2 * size**3 / first, 2 * size**3 / last, data.nbytes / reading


def roofline(
    model: Any, prompts: Sequence[int], length: int, block: int, steps: int, flops: float, bandwidth: float
) -> float:
    """The least seconds of a block-causal call over prompts of these lengths: for every forward pass the longer of
    reading the weights and what is cached, and of the multiplications.

    A block takes `steps` forward passes, the first together with what is not cached yet: the prompt or the block
    before. The last block is not cached. A prompt's attention is left out. Of routed experts those that a token is
    sent to are multiplied, and those that any is sent to, if each goes anywhere with the same chance, are read.
    """
    config = model.config
    routed = {name for name, _ in model.named_parameters() if ".experts." in name}
    experts = dense = 0
    for name, parameter in model.named_parameters():
        if name in routed:
            experts += parameter.numel()
        elif "embed_tokens" not in name and "lm_head" not in name:
            dense += parameter.numel()
    chosen = config.num_experts_per_tok / config.num_experts if experts else 0.0
    head = config.vocab_size * config.hidden_size
    group_bytes = 2 * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    batch, context = len(prompts), sum(prompts)
    active = dense + chosen * experts
    total = 0.0
    for start in range(0, length, block):
        ends = context + batch * (start + block)  # of all rows
        for step in range(steps):
            tokens = batch * block
            products = 2 * tokens * (active + head) + block * ends * pair
            if step == 0:
                committed = context if start == 0 else batch * block
                products += 2 * committed * active + (block * (ends - batch * block) * pair if start else 0)
                tokens += committed
            touched = 1 - (1 - chosen) ** tokens
            reading = (2 * (dense + touched * experts + head) + ends * group_bytes) / bandwidth
            total += max(products / flops, reading)
    return total


def kernel_profile(call: Callable[[], Any], forwards: int) -> Iterator[str]:
    """Lines that say what the GPU does in a call, in ms a forward pass: its kernels, those that take longest first,
    and how long it runs none."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.device_time)
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    idle, busy_until = 0.0, spans[0][0]
    for begin, end in spans:
        idle += max(0, begin - busy_until)
        busy_until = max(busy_until, end)
    total = busy_until - spans[0][0]
    yield f"{total / 1000 / forwards:.3f} ms a forward, idle {idle / total:.1%}"
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:KERNELS]:
        share, count = sum(times) / total, len(times)
        yield (
            f"{share:6.1%} {sum(times) / 1000 / forwards:7.3f} ms {count:6d} x {sum(times) / count:7.1f} us"
            f"  {name[:110]}"
        )
