"""What one GPU alone can show of the Megatron engine on Transformer Engine: `one_step.py --smoke`."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.layouts.cells import LATENT, ON_CPU, ON_GPU, OWN_ATTENTION, SCALED, Task
from benchmarks.layouts.one_step import LAUNCHER, Bench
from benchmarks.layouts.tables import conditions
from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import DlmBridgeError, one_line
from tests.groups import make_way

Check = Callable[[], tuple[float, float, str]]  # how far apart, how far it may be, and more
MASKED, PACKED, EXPERTS = Task("llada", "masked"), Task("llada", "masked", True), Task("llada_moe", "masked")
HALF = (1e-2, 6e-2)  # of loss and gradient in half precision, which rounds to 8 bits
HALF_LOGITS = 3e-2  # relative to the largest


def smoke(output: Path, pattern: str) -> int:
    """Run every check, print a table, write OUTPUT.md and OUTPUT.json; 1 where one failed."""
    from dlm_bridge.parallel import mcore_patches, platform

    for name in LAUNCHER:
        os.environ.pop(name, None)
    mcore_patches.install(platform.current())
    bench = Bench(output.with_name(output.name + ".work"))
    shutil.rmtree(bench.root, ignore_errors=True)
    bench.root.mkdir(parents=True)
    bench.on_cpu = platform.current().name == "cpu"
    bench.size = ON_CPU if bench.on_cpu else ON_GPU
    rows = []
    for name, check in Checks(bench).all().items():
        if not re.search(pattern, name):
            continue
        rows.append(_checked(name, check))
        bench.clean()
        print(_line(rows[-1]), flush=True)
    head = "| check | result | apart | tolerance | |\n|---|---|---|---|---|"
    text = "\n".join([conditions(), "", head, *map(_line, rows), ""])
    output.with_name(output.name + ".md").write_text(text)
    output.with_name(output.name + ".json").write_text(json.dumps({"conditions": conditions(), "checks": rows}))
    print("\n" + text, flush=True)
    shutil.rmtree(bench.root, ignore_errors=True)
    return int(any(row["result"] in ("differs", "error") for row in rows))


def _checked(name: str, check: Check) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "apart": None, "tolerance": None, "said": ""}
    began = time.time()
    try:
        row["apart"], row["tolerance"], row["said"] = check()
        row["result"] = "equal" if row["apart"] <= row["tolerance"] else "differs"
    except DlmBridgeError as error:
        row["result"], row["said"] = "refused", one_line(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {one_line(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
        row["result"], row["said"] = "error", said
    row["seconds"] = time.time() - began
    return row


def _line(row: dict[str, Any]) -> str:
    apart, tolerance = ("" if row[key] is None else f"{row[key]:.1e}" for key in ("apart", "tolerance"))
    return f"| {row['name']} | {row['result']} | {apart} | {tolerance} | {row['said'].replace('|', '/')} |"


class Checks:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.steps: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}

    def all(self) -> dict[str, Check]:
        found: dict[str, Check] = {}
        others = [Task("sdar", "block"), Task("dream", "shifted"), Task("qwen3", "causal"), EXPERTS]
        for task in (MASKED, *others, *(task for task in OWN_ATTENTION if not task.packed)):
            for precision in ("fp32", "bf16"):
                found[f"logits against the Hub model: {task.name}, {precision}"] = self._bound(
                    self.logits, task, precision
                )
                found[f"loss against the Hub model: {task.name}, {precision}"] = self._bound(
                    self.loss, task, precision
                )
        for task in (MASKED, EXPERTS):
            for recipe in ("delayed", "tensorwise", "blockwise"):
                flags = {"fp8_recipe": recipe}
                found[f"fp8 {recipe}: {task.name}, a step against bf16"] = self._bound(
                    self.step, task, "fp8", flags, "bf16", {}, (5e-2, 0.5)
                )
            for name, flags in RECOMPUTE.items():
                for precision, tolerance in (("fp32", (1e-6, 1e-4)), ("bf16", (1e-3, 2e-2))):
                    found[f"recompute {name}: {task.name}, {precision}"] = self._bound(
                        self.step, task, precision, flags, precision, {}, tolerance
                    )
        found["recompute full with fp8 delayed: llada masked"] = self._bound(
            self.step, MASKED, "fp8", RECOMPUTE["full"], "fp8", {}, (1e-2, 0.2)
        )
        grouped, sequential = {"moe_grouped_gemm": True}, {"moe_grouped_gemm": False}
        for precision, tolerance in (("fp32", (1e-5, 1e-3)), ("bf16", HALF)):
            found[f"grouped GEMM against experts one by one: {precision}"] = self._bound(
                self.step, EXPERTS, precision, grouped, precision, sequential, tolerance
            )
        gathered = {"moe_dispatcher": "allgather"}
        found["dispatchers: allgather against alltoall, fp32"] = self._bound(
            self.step, EXPERTS, "fp32", gathered, "fp32", {}, (1e-5, 1e-3)
        )
        for backend in ("flash", "fused", "unfused"):
            found[f"attention backend {backend} against auto: bf16"] = self._bound(self.backend, backend)
        for task in (PACKED, Task(SCALED, "masked", True), Task(LATENT, "causal", True)):
            name = f"packed documents of variable length, {task.model}, bf16"
            found[f"{name}: against masks, logits"] = self._bound(self.packed_logits, task)
            found[f"{name}: against each alone, logits"] = self._bound(self.packed_alone, task)
            found[f"{name}: against masks, gradients"] = self._bound(self.packed_gradients, task)
        for rows in (1, 64, 1000, 4096):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"compiled loss of chosen positions against fp64: {rows} rows, {dtype}"
                found[name] = self._bound(chosen_loss_against_fp64, rows, dtype)
        return found

    def _bound(self, check: Callable[..., tuple[float, float, str]], *arguments: Any) -> Check:
        return lambda: check(*arguments)

    def step(
        self,
        task: Task,
        precision: str,
        flags: dict[str, Any],
        other_precision: str,
        other_flags: dict[str, Any],
        tolerance: tuple[float, float],
    ) -> tuple[float, float, str]:
        """A step of the engine in two ways: how far apart is in units of the tolerance of the loss and the weights."""
        loss, weights = self._step(task, precision, flags)
        wanted, reference = self._step(task, other_precision, other_flags)
        start = Bridge.from_scratch(self.bench._model(task, precision), 1)
        moved = {name: float((weight - start.read(name).float()).abs().max()) for name, weight in reference.items()}
        farthest = max(moved.values())
        apart = {
            name: float((weights[name] - weight).abs().max()) / max(moved[name], 1e-5 * farthest)
            for name, weight in reference.items()
        }
        worst = max(apart, key=lambda name: apart[name])
        of_loss = abs(loss - wanted) / abs(wanted)
        said = (
            f"loss {of_loss:.1e} (may be {tolerance[0]:.0e}), {worst} {apart[worst]:.1e} (may be {tolerance[1]:.0e})"
        )
        return max(of_loss / tolerance[0], apart[worst] / tolerance[1]), 1.0, said

    def _step(self, task: Task, precision: str, flags: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
        key = f"{task.name} {precision} {sorted(flags.items())}"
        if key not in self.steps:
            self.steps[key] = self.bench.step(task, precision, flags)
            gc.collect()
        return self.steps[key]

    def backend(self, backend: str) -> tuple[float, float, str]:
        """megatron-core says its choice to Transformer Engine in the environment, once for all."""
        names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
        before = {name: os.environ.pop(name, None) for name in names}
        try:
            _forget_backend()
            return self.step(MASKED, "bf16", {"attention_backend": backend}, "bf16", {}, HALF)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            _forget_backend()

    def logits(self, task: Task, precision: str) -> tuple[float, float, str]:
        live, hub, noisy = self._both(task, precision)
        batch = self._micro_batch(live, noisy)
        with torch.no_grad():
            found = live.model.eval()(batch.input_ids, batch.position_ids, batch.attention_mask)
            wanted = _hub_logits(hub, noisy)
        vocab = wanted.shape[-1]
        apart = float((found[..., :vocab].cpu() - wanted).abs().max() / wanted.abs().max())
        return apart, 1e-4 if precision == "fp32" else HALF_LOGITS, ""

    def loss(self, task: Task, precision: str) -> tuple[float, float, str]:
        from dlm_bridge.parallel.gpt import model_inputs

        live, hub, noisy = self._both(task, precision)
        found, _ = live.model.train()(**model_inputs(self._micro_batch(live, noisy)))
        with torch.no_grad():
            logits = _hub_logits(hub, noisy)[noisy.mask]
        wanted = float(live.objective.loss_sum(logits, noisy).sum())
        return abs(float(found) - wanted) / abs(wanted), 1e-5 if precision == "fp32" else HALF[0], ""

    def packed_logits(self, task: Task) -> tuple[float, float, str]:
        live, noisy = self._packed(task)
        with torch.no_grad():
            packed = self._packed_logits(live, noisy)
            batch = self._micro_batch(live, noisy)
            masked = live.model.eval()(batch.input_ids, batch.position_ids, batch.attention_mask)
        return float((packed - masked.flatten(0, 1)).abs().max() / masked.abs().max()), HALF_LOGITS, ""

    def packed_alone(self, task: Task) -> tuple[float, float, str]:
        live, noisy = self._packed(task)
        with torch.no_grad():
            packed = self._packed_logits(live, noisy)
            batch = self._micro_batch(live, noisy, packed=True)
            ends = batch.packed.cu_seqlens.tolist()
            alone = [
                live.model.eval()(batch.input_ids[:, first:last]).flatten(0, 1)
                for first, last in itertools.pairwise(ends)
            ]
        wanted = torch.cat(alone)
        return float((packed - wanted).abs().max() / wanted.abs().max()), HALF_LOGITS, f"{len(ends) - 1} documents"

    def packed_gradients(self, task: Task) -> tuple[float, float, str]:
        from dlm_bridge.parallel.gpt import model_inputs

        live, noisy = self._packed(task)
        found = []
        for packed in (True, False):
            loss, _ = live.model.train()(**model_inputs(self._micro_batch(live, noisy, packed)))
            live.model.zero_grad()
            loss.backward()
            found.append(
                {name: p.grad.float().clone() for name, p in live.model.named_parameters() if p.grad is not None}
            )
        apart = {
            name: float((found[0][name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))
            for name, wanted in found[1].items()
        }
        worst = max(apart, key=lambda name: apart[name])
        return apart[worst], HALF[1], worst

    def _packed_logits(self, live: Live, noisy: Any) -> torch.Tensor:
        batch = self._micro_batch(live, noisy, packed=True)
        logits = live.model.eval()(batch.input_ids, None, None, packed_seq_params=batch.packed.params())
        return logits.flatten(0, 1)

    def _packed(self, task: Task) -> tuple[Live, Any]:
        live = self._live(task, "bf16")
        length = self.bench.size.length
        documents = torch.stack(
            [torch.arange(length) // (length // 3 + 1), (torch.arange(length) >= length // 4).long()]
        )
        return live, live.objective.noise(self._tokens(), self._uniforms(), documents=documents)

    def _both(self, task: Task, precision: str) -> tuple[Live, Any, Any]:
        live = self._live(task, precision)
        hub = live.bridge.build_hf_model().to(torch.bfloat16 if precision == "bf16" else torch.float32).float()
        return live, hub, live.objective.noise(self._tokens(), self._uniforms())

    def _live(self, task: Task, precision: str) -> Live:
        return Live(self.bench, task, precision)

    def _micro_batch(self, live: Live, noisy: Any, packed: bool = False) -> Any:
        from dlm_bridge.parallel import platform
        from dlm_bridge.parallel.attention import block_size
        from dlm_bridge.parallel.batch import micro_batch
        from dlm_bridge.parallel.self_attention import scales_queries

        attention_pattern = live.bridge.family.attention_pattern
        absolute = scales_queries(live.model.config)
        batch = micro_batch(
            noisy, attention_pattern, block_size(live.bridge.checkpoint), packed=packed, absolute=absolute
        )
        return batch.to(platform.current().device())

    def _tokens(self) -> torch.Tensor:
        size = self.bench.size
        return torch.randint(0, size.vocab - 2, (2, size.length), generator=torch.Generator().manual_seed(5))

    def _uniforms(self) -> Any:
        from dlm_bridge.objectives.noise import Uniforms

        return Uniforms.keyed(7, 1, range(2), self.bench.size.length)


class Live:
    """A model as the engine builds it, on one process, and its objective."""

    def __init__(self, bench: Bench, task: Task, precision: str) -> None:
        from dlm_bridge.parallel import groups
        from dlm_bridge.parallel.parallelize import build_megatron_model
        from dlm_bridge.parallel.train.mcore_config import DTYPES, transformer_overrides
        from dlm_bridge.train.setup import open_megatron_source, resolve_objective

        make_way(Layout())
        config = bench.config(task, precision, {})
        source = open_megatron_source(config, None)
        config, self.objective = resolve_objective(config, source.model)
        self.bridge = source.bridge
        groups.initialize(Layout())
        overrides = transformer_overrides(config, self.bridge, self.objective)
        # Without a wrapper for data parallelism there is no buffer to accumulate into.
        overrides["gradient_accumulation_fusion"] = False
        (self.model,) = build_megatron_model(self.bridge.checkpoint, Layout(), DTYPES[precision], **overrides)


RECOMPUTE: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "full of two layers": {"recompute": "full", "recompute_layers": 2},
}


def chosen_loss_against_fp64(rows: int, dtype: torch.dtype) -> tuple[float, float, str]:
    """The loss and both gradients, as `parallel.output` computes them on this device."""
    from dlm_bridge.objectives.linear_cross_entropy import LossPositions, VocabShard, linear_cross_entropy
    from dlm_bridge.parallel import groups, platform

    groups.initialize(Layout())
    device = platform.current().device()
    generator = torch.Generator().manual_seed(rows)
    size, vocab, padded = 128, 1009, 1024
    hidden = torch.randn(rows, size, generator=generator).to(device, dtype).requires_grad_()
    values = torch.randn(padded, size, generator=generator)
    values[vocab:] = 50  # padding that would win every softmax
    weight = torch.nn.Parameter(values.to(device, dtype))
    targets = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    weights = (torch.rand(rows, generator=generator) / rows).to(device)
    chosen = LossPositions(torch.arange(rows, device=device), targets, weights)
    loss, _ = linear_cross_entropy(hidden, weight, chosen, VocabShard(0, vocab, dist.group.WORLD))
    loss.backward()
    h, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    losses = torch.nn.functional.cross_entropy(h @ w[:vocab].t(), targets, reduction="none") * weights
    losses.sum().backward()
    pairs = {"loss": (loss, losses.sum()), "hidden": (hidden.grad, h.grad), "weight": (weight.grad, w.grad)}
    apart = {
        name: float((found.double() - wanted).abs().max() / wanted.abs().max())
        for name, (found, wanted) in pairs.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    return apart[worst], 1e-4 if dtype == torch.float32 else 2e-2, worst


def _hub_logits(hub: Any, noisy: Any) -> torch.Tensor:
    """[B, S, V] fp32 on the CPU."""
    positions = None if noisy.position_ids is None else noisy.position_ids.expand_as(noisy.input_ids)
    return hub(noisy.input_ids, attention_mask=noisy.model_mask(), position_ids=positions).logits.float()


def _forget_backend() -> None:
    """Let Transformer Engine choose its attention anew."""
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as module
    except ImportError:
        return
    found = getattr(module, "_attention_backends", None)
    if isinstance(found, dict):
        found["backend_selection_requires_update"] = True
