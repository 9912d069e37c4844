"""What two processes check of training on megatron-core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlm_bridge import Bridge
from dlm_bridge.mapping.dtypes import parse_dtype
from dlm_bridge.parallel import groups
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.mcore_patches.fused_step import DistributedShards
from tests.groups import make_way
from tests.parallel.training_cases import ALONE, BALANCED, FULL, GLOBALLY_BALANCED, LAYOUTS, LOSS_SCALE, STEPS, Files
from tests.parallel.training_loop import Setup, Trainer

RANK = int(os.environ["RANK"])
TOLERANCE = 1e-5
STILL = {"moe_router_bias_update_rate": 0.0}  # transformers has nothing that moves the expert bias


def trains_alone(files: Files, name: str) -> None:
    """Not compared: what the others are compared with, one process on its own."""
    model, setup = ALONE[name]
    path = files.alone(name, RANK)
    with _alone():
        trainer = _trainer(files, model, Setup(**setup))
        losses = trainer.train(STEPS)
        found = {"losses": losses, "auxiliary": trainer.auxiliary_losses(), "weights": trainer.weights()}
        torch.save(found, path)


def trains_as_torch_does(
    files: Files,
    model: str,
    layout: str,
    distributed: bool = False,
    ddp: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Losses, gradient norms and weights of a few steps are those of one process with torch's AdamW."""
    instances = (ddp or {}).get("num_distributed_optimizer_instances", 1)
    if instances > 1:
        groups.destroy()
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    setup = Setup(LAYOUTS[layout], distributed=distributed, ddp=ddp or {}, model={**STILL, **(options or {})})
    trainer = _trainer(files, model, setup)
    losses = trainer.train(STEPS)
    wanted = torch.load(files.reference(model))
    _assert_near(losses, wanted["losses"])
    _assert_near(trainer.gradient_norms, wanted["norms"])
    _assert_close(trainer.weights(), wanted["weights"])
    if instances > 1:
        groups.destroy()


def balances_alike(files: Files, layout: str, options: dict[str, Any]) -> None:
    """Auxiliary losses and the expert bias move the weights as on one process."""
    wanted = torch.load(files.alone("balanced", RANK))
    trainer = _trainer(files, "grouped", Setup(LAYOUTS[layout], distributed=True, model={**BALANCED, **options}))
    losses = trainer.train(STEPS)
    _assert_near(losses, wanted["losses"])
    auxiliary = trainer.auxiliary_losses()
    assert auxiliary.keys() == {"load_balancing_loss", "seq_load_balancing_loss", "z_loss"}
    _assert_near(auxiliary, wanted["auxiliary"])
    found = trainer.weights()
    _assert_close(found, wanted["weights"])
    start = Bridge.from_hf(files.hub("grouped"))
    biases = [name for name in found if name.endswith("expert_bias")]
    assert biases
    for name in biases:  # each step moves each by the rate, or not at all
        moved = (found[name] - start.read(name)).abs().max()
        assert 0 < moved <= STEPS * 1e-3 + 1e-6, (name, moved)
    unbalanced = torch.load(files.reference("grouped"))["weights"]
    router = next(name for name in found if name.endswith("gate.weight"))
    assert not torch.allclose(found[router], unbalanced[router], rtol=0, atol=1e-4)


def balances_globally_alike(files: Files) -> None:
    """The balance over a batch depends on which samples run together, but not on expert parallelism."""
    found = {}
    for layout in ("dp2", "ep2"):
        trainer = _trainer(files, "softmax", Setup(LAYOUTS[layout], distributed=True, model=GLOBALLY_BALANCED))
        losses = trainer.train(STEPS)
        found[layout] = {"losses": losses, "auxiliary": trainer.auxiliary_losses(), "weights": trainer.weights()}
    _assert_near(found["ep2"]["losses"], found["dp2"]["losses"])
    assert found["ep2"]["auxiliary"]["global_load_balancing_loss"] > 0
    _assert_near(found["ep2"]["auxiliary"], found["dp2"]["auxiliary"])
    _assert_close(found["ep2"]["weights"], found["dp2"]["weights"])
    unbalanced = torch.load(files.reference("softmax"))["weights"]
    router = next(name for name in unbalanced if name.endswith("gate.weight"))
    assert not torch.allclose(found["ep2"]["weights"][router], unbalanced[router], rtol=0, atol=1e-4)


def recomputes_the_same_dropout(files: Files) -> None:
    """Recomputation puts the random numbers back where the forward pass had them."""
    dropout = {"sequence_parallel": True, "hidden_dropout": 0.1}
    losses = []
    for options in (dropout, dropout | FULL):
        groups.destroy()  # seeds are set when groups are made
        losses.append(_trainer(files, "dense", Setup(LAYOUTS["tp2"], model=options)).train(STEPS))
    assert losses[0] == losses[1]
    assert losses[0] != pytest.approx(torch.load(files.reference("dense"))["losses"], rel=1e-3)


def half_precision_trains_alike(files: Files, dtype: str) -> None:
    """Both optimizers keep fp32 weights behind the model's, and do on two replicas what one process does."""
    alone = torch.load(files.alone(dtype, RANK))
    weights = []
    for distributed in (False, True):
        setup = Setup(LAYOUTS["dp2"], dtype=dtype, distributed=distributed, optimizer=LOSS_SCALE)
        trainer = _trainer(files, "dense", setup)
        _assert_near(trainer.train(STEPS), alone["losses"], 1e-3)
        weights.append(trainer.weights())
        if distributed:
            _shards_are_megatron_cores(trainer)
    start = Bridge.from_hf(files.hub("dense"))
    moved = sum(float((tensor.float() - start.read(name)).square().sum()) for name, tensor in weights[0].items())
    # A weight that is rounded to the other neighbour moves what Adam does with small gradients.
    apart = sum(float((weights[1][name] - tensor).float().square().sum()) for name, tensor in weights[0].items())
    assert apart < 1e-4 * moved, (apart, moved)
    assert {tensor.dtype for tensor in weights[0].values()} == {parse_dtype(dtype)}


def _shards_are_megatron_cores(trainer: Trainer) -> None:
    """Where the engine's kernels find gradients and weights is where megatron-core puts them."""
    parts = trainer.optimizer.chained_optimizers
    assert sum(len(group) for part in parts for group in part.shard_fp32_from_float16_groups) > 0
    for part in parts:
        shards = DistributedShards(part)
        assert shards.valid()
        assert shards.set_gradients() == (part.grad_scaler is None)
        given = {main: main.grad for group in part.optimizer.param_groups for main in group["params"]}
        for main in given:
            main.grad = None
        part._copy_model_grads_to_main_grads()
        for main, gradient in given.items():
            assert part.grad_scaler or gradient.data_ptr() == main.grad.data_ptr()
            assert part.grad_scaler or torch.equal(gradient, main.grad)
        for main, param in shards.model_params.items():
            assert torch.equal(param, main.to(param.dtype))
            param.add_(1)
        moved = [param.clone() for param in shards.model_params.values()]
        part._copy_main_params_to_model_params()  # writes where the shards are
        assert all(
            not torch.equal(param, other) for param, other in zip(shards.model_params.values(), moved, strict=True)
        )
        assert all(torch.equal(param, main.to(param.dtype)) for main, param in shards.model_params.items())
        part.buffers[0].buckets[0].grad_data = part.buffers[0].buckets[0].grad_data.clone()
        assert not shards.valid()


def an_overflow_is_skipped(files: Files) -> None:
    scale = {"initial_loss_scale": 2.0**32, "hysteresis": 1}
    for distributed in (False, True):
        setup = Setup(LAYOUTS["dp2"], dtype="fp16", distributed=distributed, optimizer=scale)
        trainer = _trainer(files, "dense", setup)
        before = trainer.weights()
        trainer.train(1)
        assert not trainer.updated
        assert float(trainer.optimizer.get_loss_scale()) == 2.0**31
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())


def continues(
    files: Files,
    name: str,
    model: str = "dense",
    layout: str = "dp2",
    dtype: str = "fp32",
    before: int = 2,
    sharding: str = "",
    **how: bool,
) -> None:
    """A run that is loaded again goes on exactly as the one that was saved."""
    setup = Setup(LAYOUTS[layout], dtype=dtype, distributed=bool(sharding), optimizer=LOSS_SCALE)
    trainer = _trainer(files, model, setup)
    trainer.train(before)
    trainer.save(files.saved(name), sharding, **how)
    losses, weights = trainer.train(2), trainer.weights()
    again = _trainer(files, model, setup)
    again.load(files.saved(name), sharding, parallel=how.get("parallel", False))
    assert again.train(2) == losses
    found = again.weights()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in weights.items())
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "weights": weights}, files.saved(name) / "continued.pt")
    dist.barrier()


def continues_elsewhere(files: Files, source: str, target: str) -> None:
    """What a layout saved, another goes on with."""
    folder = files.saved(f"{source}-{target}")
    trainer = _trainer(files, "dense", Setup(LAYOUTS[source], distributed=True))
    trainer.train(2)
    trainer.save(folder, "fully_reshardable")
    losses, weights = trainer.train(2), trainer.weights()
    again = _trainer(files, "dense", Setup(LAYOUTS[target], distributed=True))
    again.load(folder, "fully_reshardable")
    _assert_near(again.train(2), losses)
    _assert_close(again.weights(), weights)


def continues_alone(files: Files, sharding: str) -> None:
    """What two replicas saved, one process goes on with."""
    wanted = torch.load(files.saved(sharding) / "continued.pt")
    with _alone():
        again = _trainer(files, "dense", Setup(distributed=True))
        again.load(files.saved(sharding), sharding)
        _assert_near(again.train(2), wanted["losses"])
        _assert_close(again.weights(), wanted["weights"])


def _trainer(files: Files, model: str, setup: Setup) -> Trainer:
    make_way(setup.layout, instances=setup.ddp.get("num_distributed_optimizer_instances", 1))
    return Trainer(Bridge.from_hf(files.hub(model)), setup)


@contextmanager
def _alone() -> Iterator[None]:
    """Each process is a world of its own here."""
    if dist.is_initialized():
        groups.destroy()
        dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name)
        yield
    groups.destroy()
    dist.destroy_process_group()


def _assert_near(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    """Numbers, in a list or by name."""
    assert found == pytest.approx(wanted, rel=tolerance), f"{found} is not {wanted}"


def _assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = (found[name] - tensor).abs().max()
        assert torch.allclose(found[name], tensor, rtol=TOLERANCE, atol=TOLERANCE), f"{name} differs by {difference}"
