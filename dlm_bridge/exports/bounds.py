"""`verify --against`: a quantised Hub folder beside the checkpoint that it was made from.

Every quantised weight is dequantised, and its rounding error compared with the largest one that its scales allow. All
other tensors must be equal.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints import find_checkpoint
from dlm_bridge.convert.settings import Progress
from dlm_bridge.convert.verify import Difference, Verdict, compare_tensors, total_bytes
from dlm_bridge.errors import CheckpointError, DlmBridgeError, SettingError, counted
from dlm_bridge.evaluation.logits import LENGTH, TOLERANCE, canvas_length, model_logits
from dlm_bridge.exports.compressed import QuantizedCheckpoint
from dlm_bridge.exports.loading import load_quantized
from dlm_bridge.exports.schemes import QuantizedWeight
from dlm_bridge.hub import checkpoint_folder, quantization_method, resolve
from dlm_bridge.mapping.dtypes import dtype_name, same_bits

KL_LIMIT = 0.01  # mean over positions, for weights of 8 bits
_ELEMENTS = 1 << 24  # compared at a time


@dataclass
class QuantizedVerdict(Verdict):
    """Result of `verify_quantized`.

    Args:
        weights: number of quantised weights.
        bits: bits of the quantised weights, the fewest.
        error: largest rounding error as a fraction of its bound.
        kl: mean Kullback-Leibler divergence of the next-token distributions from the source's; None: not computed.
        largest_kl: that of one position.
        dequantized_difference: largest difference from the logits of the dequantised weights.
    """

    weights: int = 0
    bits: int = 8
    error: float = 0.0
    kl: float | None = None
    largest_kl: float | None = None
    dequantized_difference: float | None = None


def verify_quantized(
    folder: str | os.PathLike[str],
    against: str | os.PathLike[str],
    logits: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> QuantizedVerdict:
    """Compare a quantised Hub folder with the checkpoint that it was made from.

    With `logits`, also the next-token distributions of both models in fp32 on random tokens: for weights of 8 bits
    their mean divergence must be at most `KL_LIMIT`, and for all the logits must be those of the dequantised weights.

    Raises:
        CheckpointError: a path is not a checkpoint.
        SettingError: `folder` is not quantised, or `against` is.
    """
    root = resolve(checkpoint_folder(folder), None)
    if quantization_method(root) is None:
        raise SettingError("against", f"{root} is not quantised: name both checkpoints without `against`")
    made = QuantizedCheckpoint(root)
    source = find_checkpoint(against)
    if not source.names_model:
        source.adopt(made)
    if isinstance(source.root, Path) and quantization_method(source.root) is not None:
        raise SettingError("against", f"{source.where} is quantised: name the checkpoint that {root} was made from")
    specs, found = source.stored_specs(), made.stored_specs()
    differences = [Difference(key, "extra", f"in {source.where}, but not a Hub tensor") for key in source.unmapped()]
    differences += [Difference(name, "missing", f"not in {made.where}") for name in specs if name not in found]
    differences += [Difference(name, "missing", f"not in {source.where}") for name in found if name not in specs]
    common = [name for name in found if name in specs]
    errors: dict[str, float] = {}
    casts: set[str] = set()

    def compare(name: str, tensor: torch.Tensor) -> Difference | None:
        if tuple(tensor.shape) != found[name][1]:
            return Difference(name, "shape", f"{list(found[name][1])} and {list(tensor.shape)}")
        if name in made.reader.quantised:
            stack = made.reader.stacks.get(name)
            weight = tensor if stack is None else stack.matrix(tensor)
            errors[name], problem = _largest_error(made.reader.read_quantized(name), weight)
            return Difference(name, "values", problem) if problem else None
        here = made.read(name)
        if here.dtype != tensor.dtype and same_bits(here, tensor.to(here.dtype)):
            casts.add(dtype_name(here.dtype))
            return None
        if not same_bits(here, tensor):
            return Difference(name, "values", "is not quantised, and differs")
        return None

    differences += compare_tensors(common, specs, (source,), compare, workers, progress)
    verdict = QuantizedVerdict(made.where, source.where, not differences, len(common), total_bytes(common, specs))
    verdict.differences, verdict.weights = differences, len(made.reader.quantised)
    verdict.bits = min(parts.bits for parts in made.reader.parts.values())
    verdict.error = max(errors.values(), default=0.0)
    if casts:
        verdict.notes.append(f"other tensors were cast to {', '.join(sorted(casts))}")
    if logits and not differences:
        _add_logits(verdict, made, source)
    verdict.summary = _summary(verdict)
    return verdict


def _largest_error(made: QuantizedWeight, weight: torch.Tensor) -> tuple[float, str]:
    """Largest rounding error as a fraction of its bound, and the problem if it is larger."""
    weight = weight.to(made.scale.dtype)
    largest, step = 0.0, max(1, _ELEMENTS // weight.shape[1])
    for first in range(0, len(weight), step):
        error, bound = made.rows(first, first + step).error_bounds(weight[first : first + step])
        fraction = (error / bound).nan_to_num(torch.inf, torch.inf)
        largest = max(largest, float(fraction.max()))
        if largest > 1:
            place = int(fraction.argmax())
            row, column = first + place // weight.shape[1], place % weight.shape[1]
            return largest, (
                f"element [{row}, {column}] differs by {float(error.view(-1)[place]):.2e}, allowed are "
                f"{float(bound.view(-1)[place]):.2e}"
            )
    return largest, ""


@torch.no_grad()
def _add_logits(verdict: QuantizedVerdict, made: QuantizedCheckpoint, source: Checkpoint) -> None:
    """Add the comparison of logits; a difference makes the verdict unequal."""
    try:
        model, _ = load_quantized(made.folder, made.where, None, torch.float32, None)
        canvas = canvas_length(Bridge(made))
        tokens = torch.randint(made.dims.vocab, (1, LENGTH + canvas), generator=torch.Generator().manual_seed(0))
        own = model_logits(model.eval(), tokens, canvas).float()
        del model
        exact = QuantizedCheckpoint(made.folder, dtype=torch.float32)
        plain, original = (_logits(checkpoint, tokens, canvas) for checkpoint in (exact, source))
    except DlmBridgeError as error:
        verdict.differences.append(Difference("logits", "unreadable", str(error)))
        verdict.equal = False
        return
    difference = float((own - plain).abs().max())
    expected = original.log_softmax(dim=-1)
    divergence = (expected.exp() * (expected - own.log_softmax(dim=-1))).sum(dim=-1)
    verdict.dequantized_difference = difference
    verdict.kl, verdict.largest_kl = float(divergence.mean()), float(divergence.max())
    allowed = TOLERANCE * max(1.0, float(plain.abs().max()))
    problems = []
    if not difference <= allowed:
        problems.append(f"they differ by {difference:.1e} from the dequantised weights', allowed are {allowed:.1e}")
    if verdict.bits == 8 and not verdict.kl <= KL_LIMIT:
        problems.append(f"KL {verdict.kl:.4f} from the source's, allowed is {KL_LIMIT}")
    verdict.differences += [Difference("logits", "values", problem) for problem in problems]
    verdict.equal = not problems


def _logits(checkpoint: Checkpoint, tokens: torch.Tensor, canvas: int) -> torch.Tensor:
    logits = model_logits(Bridge(checkpoint).build_hf_model(torch.float32).eval(), tokens, canvas)
    if not logits.isfinite().all():
        raise CheckpointError(checkpoint.where, "its logits are NaN or infinite")
    return logits.float()


def _summary(verdict: QuantizedVerdict) -> str:
    weights = counted(verdict.weights, f"{verdict.bits}-bit weight")
    others = counted(verdict.tensors - verdict.weights, "other tensor")
    text = (
        f"{verdict.a} is {verdict.b} with {weights} (rounding errors up to {verdict.error:.0%} of their bounds), "
        f"{others} equal"
    )
    if verdict.kl is not None:
        text += f"; logits: KL {verdict.kl:.4f} (one position at most {verdict.largest_kl:.4f})"
    return text
