"""Multi-token prediction layers in training: loss and gradients of the live model against the formula, with
transformers' own layers, and what a micro-batch holds of each depth. Layouts are compared by test_megatron."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge import Bridge, Layout
from dlm_bridge.attention.masks import MaskDescriptor
from dlm_bridge.errors import SettingError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import NextTokenPrediction
from dlm_bridge.parallel.batch import Prediction, micro_batch
from tests.checkpoints import write_hub_folder
from tests.interop.autoregressive import CONFIGS, tensors_of
from tests.refusals import refused

pytest.importorskip("megatron.core")
ROWS, LENGTH, FACTOR = 2, 12, 0.3
SMALL = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}


def config_of(name: str, depths: int) -> dict[str, Any]:
    """A tiny config of a family, with so many multi-token prediction layers."""
    return {**CONFIGS[name], **SMALL, "num_nextn_predict_layers": depths}


def batch() -> NoisyBatch:
    """Rows of the objective `causal`, the second one padded, with loss weights and their divisor."""
    ids = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :3] = labels[1, 9:] = -100
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, 9:] = False
    objective = NextTokenPrediction()
    noisy = objective.noise(ids, Uniforms.keyed(0, 1, range(ROWS), LENGTH), labels, attention_mask=real)
    return dataclasses.replace(noisy, weights=noisy.weights / noisy.normaliser[0])


class Formula:
    """DeepSeek-V3's report (arXiv 2412.19437), equations 21 to 25, written out: depth k takes the hidden state of the
    depth before at position i and the embedding of token i + k, and predicts token i + k + 1 with the model's head.
    transformers computes the layers: its model is given the prediction layers as if they were its last ones."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        from transformers import AutoModelForCausalLM

        self.layers, self.depths = config["num_hidden_layers"], config["num_nextn_predict_layers"]
        grown = {**config, "num_hidden_layers": self.layers + self.depths, "num_nextn_predict_layers": 0}
        self.final = "final_layernorm.weight" if "BailingMoeV2ForCausalLM" in config["architectures"] else ""
        self.final = self.final or "shared_head.norm.weight"
        own = ("enorm.weight", "hnorm.weight", "eh_proj.weight", self.final)
        self.own = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items() if name.endswith(own)}
        write_hub_folder(folder, grown, {name: tensor for name, tensor in tensors.items() if name not in self.own})
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        self.eps = config["rms_norm_eps"]

    def loss(self, noisy: NoisyBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The next-token loss, and the mean of those of all depths."""
        body, ids = self.model.model, noisy.input_ids
        positions = torch.arange(LENGTH)[None]
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & noisy.attention_mask[:, None, None]
        mask = torch.zeros(allowed.shape).masked_fill(~(allowed | torch.eye(LENGTH, dtype=torch.bool)), -1e30)
        rotary = body.rotary_emb(body.embed_tokens(ids), positions)

        def layer(number: int, hidden: torch.Tensor) -> torch.Tensor:
            return body.layers[number](hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)

        hidden = body.embed_tokens(ids)
        for number in range(self.layers):
            hidden = layer(number, hidden)
        hidden = body.norm(hidden)
        weights = torch.zeros(ROWS, LENGTH).masked_scatter(noisy.mask, noisy.weights)
        main, more = self._cross_entropy(hidden, ids, weights, 0), []
        for depth in range(1, self.depths + 1):
            prefix = f"model.layers.{self.layers + depth - 1}."
            ahead = F.pad(ids[:, depth:], (0, depth))
            both = torch.cat(
                [
                    self._norm(body.embed_tokens(ahead), prefix + "enorm.weight"),
                    self._norm(hidden, prefix + "hnorm.weight"),
                ],
                dim=-1,
            )
            hidden = layer(self.layers + depth - 1, both @ self.own[prefix + "eh_proj.weight"].T)
            hidden = self._norm(hidden, prefix + self.final)
            more.append(self._cross_entropy(hidden, ids, weights, depth))
        return main, torch.stack(more).mean()

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(values, values.shape[-1:], self.own[name], self.eps)

    def _cross_entropy(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Of token i + depth + 1 at position i, with the weight that it has in the next-token loss."""
        logits = self.model.lm_head(hidden)[:, : LENGTH - depth - 1]
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, depth + 1 :].flatten(), reduction="none")
        return (losses * weights[:, depth : LENGTH - 1].flatten()).sum()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Under the Hub's names."""
        from transformers.core_model_loading import revert_weight_conversion

        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {**revert_weight_conversion(self.model, found), **{n: tensor.grad for n, tensor in self.own.items()}}


@pytest.mark.parametrize(("family", "depths"), [("glm4_moe", 2), ("deepseek_v3", 1), ("bailing_moe_v2", 2)])
def test_loss_and_gradients_are_the_formulas(family: str, depths: int, tmp_path: Path) -> None:
    config = config_of(family, depths)
    tensors = tensors_of(config, 1)
    write_hub_folder(tmp_path / "hub", config, tensors)
    formula, noisy = Formula(tmp_path / "grown", config, tensors), batch()
    main, more = formula.loss(noisy)
    (main + FACTOR * more).backward()

    bridge = Bridge.from_hf(tmp_path / "hub")
    (model,) = bridge.build_megatron_model(Layout(), mtp_num_layers=depths, mtp_loss_scaling_factor=FACTOR)
    from dlm_bridge.parallel.gpt import model_inputs

    inputs = model_inputs(micro_batch(noisy, "causal", depths=depths))
    loss, sums = model(**inputs)
    loss.backward()
    torch.testing.assert_close(loss, main + FACTOR * more, rtol=1e-5, atol=0)
    torch.testing.assert_close(sums, torch.stack([main, more]).detach(), rtol=1e-5, atol=0)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found = dict(bridge.stream_hf_weights(model))
    for name, gradient in formula.gradients().items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, atol=1e-4 * largest, rtol=0, msg=name)
    (alone,) = bridge.build_megatron_model(Layout())
    _, plain = alone(**model_inputs(micro_batch(noisy, "causal")))
    assert torch.equal(plain, sums[:1])


def places(prediction: Prediction, length: int) -> list[tuple[int, int]]:
    """Row and position of each loss position, in order."""
    real = prediction.loss_positions[prediction.weights > 0]
    return [(int(place) // length, int(place) % length) for place in real]


def test_a_depth_predicts_what_the_next_token_loss_does_within_a_document() -> None:
    """Documents of 5 and 3 tokens, then 2 of padding; the first token of each is not predicted."""
    ids = torch.arange(10)[None] + 20
    documents = torch.tensor([[0] * 5 + [1] * 3 + [-1, -2]])
    real = documents >= 0
    noisy = dataclasses.replace(
        batch(),
        input_ids=ids,
        attention_mask=real,
        mask_descriptor=MaskDescriptor.causal(documents),
        mask=torch.tensor([[1, 1, 1, 1, 0, 1, 1, 0, 0, 0]], dtype=torch.bool),
        targets=torch.tensor([21, 22, 23, 24, 26, 27]),
        weights=torch.arange(1.0, 7.0),
    )
    first, second, third = micro_batch(noisy, "causal", depths=3).predictions
    assert places(first, 10) == [(0, 0), (0, 1), (0, 2), (0, 5)]
    assert first.targets[:4].tolist() == [22, 23, 24, 27]
    assert first.weights[:4].tolist() == [2.0, 3.0, 4.0, 6.0]
    assert first.input_ids.tolist() == [[*range(21, 30), 0]]
    assert (places(second, 10), second.targets[:2].tolist()) == ([(0, 0), (0, 1)], [23, 24])
    assert second.input_ids.tolist() == [[*range(22, 30), 0, 0]]
    assert (places(third, 10), third.targets[:1].tolist()) == ([(0, 0)], [24])


@pytest.mark.parametrize("documents", [False, True])
def test_ranks_of_a_context_have_the_whole_rows_predictions(documents: bool) -> None:
    noisy = batch()
    if documents:
        ids = torch.arange(LENGTH)[None].expand(ROWS, -1) // 5
        noisy = dataclasses.replace(noisy, mask_descriptor=MaskDescriptor.causal(ids), attention_mask=None)
    from dlm_bridge.parallel.batch import rank_positions

    order = rank_positions(LENGTH, 2, 1)
    whole = micro_batch(noisy, "causal", depths=2).predictions
    for depth in range(2):
        found = set()
        for rank in range(2):
            part = micro_batch(noisy, "causal", cp_rank=rank, cp_size=2, depths=2).predictions[depth]
            assert torch.equal(part.input_ids, whole[depth].input_ids[:, order[rank]])
            rows = [(row, int(order[rank][place])) for row, place in places(part, LENGTH // 2)]
            found |= {*zip(rows, part.targets.tolist(), part.weights.tolist(), strict=False)}
        rows = places(whole[depth], LENGTH)
        assert found == {*zip(rows, whole[depth].targets.tolist(), whole[depth].weights.tolist(), strict=False)}


def test_packed_rows_stand_one_after_the_other() -> None:
    noisy = dataclasses.replace(batch(), attention_mask=None)
    apart, packed = (micro_batch(noisy, "causal", packed=packed, depths=1).predictions[0] for packed in (False, True))
    assert torch.equal(packed.input_ids, apart.input_ids.reshape(1, -1))
    assert torch.equal(packed.loss_positions, apart.loss_positions)


def test_a_number_of_layers_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    config = config_of("glm4_moe", 1)
    write_hub_folder(tmp_path / "hub", config, tensors_of(config, 1))
    with refused(SettingError, "mtp_num_layers", "2", "1"):
        Bridge.from_hf(tmp_path / "hub").build_megatron_model(Layout(), mtp_num_layers=2)
