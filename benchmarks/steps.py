"""What a step of each sampler costs the host: operators that it dispatches, and on a GPU where it waits for the GPU.

    python benchmarks/steps.py --device cuda --rows 16 64 --where
    python benchmarks/steps.py --device cpu --rows 2 4 --layers 1 --hidden 32     # the operators alone

Small models with random weights draw tokens for ragged prompts. A line says, for each number of rows, the median over
the steps of a run: `operators` as torch's dispatcher counts them, `waits` of the host for the device as
`torch.cuda.set_sync_debug_mode` sees them (the one read that a step overlaps with is not among them), `ms`. With
--where each place that waited follows, with its number of times.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_bridge.generation import engine
from dlm_bridge.models.families import family_by_name

VOCABULARY = 32_000
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llada", {"block_length": 16}),
    ("llada", {"block_length": 16, "threshold": 0.9, "cache": "dual"}),
    ("llada", {"block_length": 16, "remasking": "random"}),
    ("llada", {"block_length": 16, "no_repeat_ngram_size": 3}),
    ("dream", {"steps": 16}),
    ("dream", {"steps": 16, "alg": "entropy", "alg_temp": 0.4}),
    ("dream", {"steps": 16, "alg": "confidence_threshold"}),
    ("dreamon", {}),
    ("sdar", {}),
    ("fast_dllm_v2", {}),
    ("fast_dllm_v2", {"cache": "dual"}),
    ("wedlm", {}),
    ("idlm", {}),
    ("nemotron_labs_diffusion", {"algorithm": "linear_spec", "block_length": 16}),
)


class Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--where", action="store_true", help="list the places that waited")
    given = parser.parse_args()
    for name, settings in CASES:
        model = build(name, given.layers, given.hidden, given.device)
        settings = {"gen_length": given.new_tokens, "eos_token_id": None, "temperature": 1.0, **settings}
        for rows in given.rows:
            found, places = measure(model, rows, settings)
            shown = ", ".join(f"{key}={value}" for key, value in settings.items() if key not in ("gen_length",))
            print(f"{name} ({shown}), {rows} rows: {found}", flush=True)
            for place, count in places.most_common() if given.where else []:
                print(f"    {count:5} {place}", flush=True)


def build(name: str, layers: int, hidden: int, device: str) -> Any:
    """The family's model with random weights."""
    spec = family_by_name(name)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "mask_token_id": VOCABULARY - 1,
        "pad_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 2,
        "max_position_embeddings": 4096,
    }
    if name == "llada":
        sizes |= {"embedding_size": VOCABULARY, "max_sequence_length": 4096}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = spec.load("model_class")._from_config(spec.load("config_class")(**sizes), dtype=dtype)
    if name == "dreamon":
        model.config.expand_token_id = VOCABULARY - 3
    return model.eval()


def measure(model: Any, rows: int, settings: dict[str, Any]) -> tuple[str, Counter[str]]:
    """The medians over the steps of a run in words, and the places that waited."""
    device = model.device
    lengths = [20 + 7 * (row % 8) for row in range(rows)]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY - 4, (rows, max(lengths)), generator=generator).to(device)
    real = (torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]).long().to(device)
    call = {"attention_mask": real, "seed": 0, **settings}
    model.generate(ids, **call)
    on_gpu = device.type == "cuda"
    counter, operators, seconds, waits, places = Operators(), [], [], [], Counter[str]()
    denoise_rows = engine.denoise_rows

    def counted(*args: Any) -> Iterator[None]:
        """Without the first step, which lays the rows out."""
        steps = denoise_rows(*args)
        next(steps)
        yield
        while True:
            before, began = counter.count, time.perf_counter()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                ended = next(steps, steps) is steps
            if ended:
                return
            operators.append(counter.count - before)
            seconds.append(time.perf_counter() - began)
            waiting = [one for one in said if "synchroniz" in str(one.message)]
            waits.append(len(waiting))
            places.update(f"{one.filename.split('site-packages/')[-1]}:{one.lineno}" for one in waiting)
            yield

    engine.denoise_rows = counted
    try:
        with counter:
            model.generate(ids, **call)
        count, words = len(operators), [f"{statistics.median(operators):.0f} operators"]
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
            model.generate(ids, **call)
            words.append(f"{statistics.median(waits):.0f} waits")
            torch.cuda.set_sync_debug_mode("default")
            seconds.clear()
            model.generate(ids, **call)
            words.append(f"{1000 * statistics.median(seconds):.2f} ms")
    finally:
        engine.denoise_rows = denoise_rows
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return f"{count} steps of {', '.join(words)}", places


if __name__ == "__main__":
    main()
