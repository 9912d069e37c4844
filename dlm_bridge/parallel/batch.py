"""One micro-batch of one rank: its context parallel part, attention mask and loss positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.attention.masks import MaskColumn, MaskDescriptor, document_ids
from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.objectives.linear_cross_entropy import loss_bucket
from dlm_bridge.objectives.losses import Certainty, NoisePositions

if TYPE_CHECKING:
    from dlm_bridge.objectives.batches import NoisyBatch


@dataclass(frozen=True)
class PackedDocuments:
    """Documents concatenated in a single row, for variable-length kernels (THD)."""

    cu_seqlens: torch.Tensor  # [documents + 1] int32: the start of each, and the row's length
    max_seqlen: int

    def params(self) -> Any:
        """megatron-core's `packed_seq_params`."""
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


@dataclass(frozen=True)
class Prediction:
    """Inputs and targets of the multi-token prediction layer of depth k = 1, 2, ...: at position i it reads the
    embedding of token i + k and predicts token i + k + 1, if that has a loss and is in the same document. M as in
    `MicroBatch`."""

    input_ids: torch.Tensor  # [B, S] int64
    loss_positions: torch.Tensor  # [M] int64, b * S + s, ascending up to the padding
    targets: torch.Tensor  # [M] int64
    weights: torch.Tensor  # [M] fp32: as in the next-token loss

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Prediction:
        """Apply a function to every tensor."""
        return Prediction(**{name: change(tensor) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and targets of a forward pass. S is the length of this context parallel rank's part of a row, M the
    number of its loss positions, padded to one of a few sizes (index 0, weight 0) so that there are few shapes."""

    input_ids: torch.Tensor  # [B, S] int64
    position_ids: torch.Tensor | None  # [B or 1, S]; None for 0..S-1, or for the positions in `packed` documents
    # Over all ranks' parts, rank after rank: a mask descriptor [B or 1, cp * S, 5], or if no descriptor expresses it
    # [B or 1, 1, cp * S, cp * S] bool (True: attends); None if the layers' own mask type is sufficient.
    attention_mask: torch.Tensor | None
    packed: PackedDocuments | None
    loss_positions: torch.Tensor  # [M] int64, b * S + s, ascending up to the padding
    targets: torch.Tensor  # [M] int64
    weights: torch.Tensor  # [M] fp32
    terms: torch.Tensor | None  # [M] int64, as in `NoisyBatch`
    noise: NoisePositions | None = None  # as in `NoisyBatch`
    certainty: Certainty | None = None  # as in `NoisyBatch`
    predictions: tuple[Prediction, ...] = ()  # for depth 1, 2, ...
    z_weights: torch.Tensor | None = None  # [M] fp32, as in `LossPositions`
    rows: torch.Tensor | None = None  # [M] int64, as in `NoisyBatch`

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to another device, asynchronously if the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> MicroBatch:
        """Copy to pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, PackedDocuments):
                value = PackedDocuments(change(value.cu_seqlens), value.max_seqlen)
            elif isinstance(value, NoisePositions):
                value = value.each(change)
            values[name] = change(value) if isinstance(value, torch.Tensor) else value
        values["predictions"] = tuple(prediction.each(change) for prediction in self.predictions)
        return MicroBatch(**values)


def micro_batch(
    noisy: NoisyBatch,
    attention_pattern: str,
    block_size: int | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    packed: bool = False,
    absolute: bool = False,
    depths: int = 0,
) -> MicroBatch:
    """One rank's part of `noisy`, on the CPU.

    Args:
        attention_pattern: the model's, for batches without a mask descriptor.
        block_size: of block-causal attention.
        packed: concatenate the rows into one row of documents for a variable-length kernel (Transformer Engine,
            without context parallelism). Otherwise documents and padding become a mask descriptor.
        absolute: the model's attention depends on absolute positions (queries scaled by position), not only on
            relative ones.
        depths: number of multi-token prediction layers.

    Raises LayoutError if context parallel ranks do not divide the sequence length, and SettingError if documents alone
    do not describe the mask.
    """
    rows, length = noisy.input_ids.shape
    descriptor = _descriptor(noisy, attention_pattern, block_size)
    plain = torch.arange(length)[None]
    streams = _streams(descriptor)
    # Rotary embeddings are relative: documents of one stream need not restart at 0, so that rows share positions.
    positions = plain
    if noisy.position_ids is not None and (streams == 2 or absolute):
        positions = _shared_positions(noisy.position_ids, descriptor)
    if packed:
        if cp_size > 1 or noisy.pairs is not None:
            raise SettingError("packed", "variable-length documents express neither context parallelism nor `pairs`")
        whole = _loss_positions(noisy, torch.arange(length))
        documents = _packed(descriptor, attention_pattern, rows, length)
        ids = noisy.input_ids.reshape(1, -1)
        predictions = _predictions(noisy, torch.arange(length), depths)
        flat = tuple(dataclasses.replace(each, input_ids=each.input_ids.reshape(1, -1)) for each in predictions)
        return _padded(MicroBatch(ids, None, None, documents, *whole, predictions=flat), rows * length)
    order = rank_positions(length, cp_size, streams)
    mine = order[cp_rank]
    attention = None if descriptor is None else descriptor[:, order.flatten()]
    if noisy.pairs is not None:
        attention = noisy.pairs[:, :, order.flatten()][..., order.flatten()]
    shown = None if cp_size == 1 and torch.equal(positions, plain) else positions[:, mine]
    ids, predictions = noisy.input_ids[:, mine], _predictions(noisy, mine, depths)
    local = MicroBatch(ids, shown, attention, None, *_loss_positions(noisy, mine), predictions=predictions)
    if noisy.rows is not None:
        local = dataclasses.replace(local, rows=noisy.rows[_targets_at(noisy, mine)])
    return _padded(local, rows * len(mine))


def rank_targets(
    noisy: NoisyBatch, attention_pattern: str, block_size: int | None = None, cp_rank: int = 0, cp_size: int = 1
) -> torch.Tensor:
    """[M] int64 indices into `noisy.targets` for the loss positions of a rank's `micro_batch`, without padding."""
    streams = _streams(_descriptor(noisy, attention_pattern, block_size))
    return _targets_at(noisy, rank_positions(noisy.input_ids.shape[1], cp_size, streams)[cp_rank])


def _descriptor(noisy: NoisyBatch, attention_pattern: str, block_size: int | None) -> torch.Tensor | None:
    """[B or 1, S, 5], or None if the attention pattern is sufficient."""
    if noisy.pairs is not None:
        return None
    if noisy.mask_descriptor is not None:
        return noisy.mask_descriptor.codes
    real = noisy.attention_mask
    padded = real is not None and not bool(real.all())
    if attention_pattern != "block_causal" and not padded:
        return None
    documents = document_ids(real if real is not None and padded else torch.ones_like(noisy.input_ids[:1]))
    return MaskDescriptor.of_pattern(attention_pattern, documents, noisy.position_ids, block_size).codes


def _streams(descriptor: torch.Tensor | None) -> int:
    return 1 if descriptor is None or not bool((descriptor[..., MaskColumn.NOISY_BLOCK] >= 0).any()) else 2


def _shared_positions(position_ids: torch.Tensor, descriptor: torch.Tensor | None) -> torch.Tensor:
    """[B or 1, S] the positions, as one row if all rows agree. A padding position, to which nothing attends, takes the
    position of a row without padding there."""
    if len(position_ids) == 1:
        return position_ids
    if descriptor is not None:
        padding = (descriptor[..., MaskColumn.DOCUMENT] < 0).expand_as(position_ids)
        usual = position_ids.masked_fill(padding, 0).amax(dim=0, keepdim=True)
        position_ids = torch.where(padding, usual, position_ids)
    agreed = bool((position_ids == position_ids[:1]).all())
    return position_ids[:1] if agreed else position_ids


def _packed(descriptor: torch.Tensor | None, attention_pattern: str, rows: int, length: int) -> PackedDocuments:
    """Document starts in the concatenated rows. Each run of padding is one document without a loss."""
    documents = (
        torch.zeros(1, length, dtype=torch.int32) if descriptor is None else descriptor[..., MaskColumn.DOCUMENT]
    )
    documents = documents.expand(rows, length)
    if descriptor is not None and (
        attention_pattern == "block_causal"
        or not torch.equal(
            MaskDescriptor.of_pattern(attention_pattern, documents).codes, descriptor.expand(rows, -1, -1)
        )
    ):
        raise SettingError(
            "packed", f"variable-length documents do not express this batch's attention mask ({attention_pattern})"
        )
    documents = documents.clamp(min=-1)
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    for row, begin in zip(documents, begins, strict=True):
        numbers = row[begin & (row >= 0)]
        if len(numbers.unique()) != len(numbers):
            raise SettingError("packed", "a document of a row is not contiguous")
    starts = begins.flatten().nonzero()[:, 0]
    ends = torch.cat([starts, torch.tensor([rows * length])]).int()
    return PackedDocuments(ends, int(ends.diff().max()))


def _loss_positions(
    noisy: NoisyBatch, mine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, NoisePositions | None, Certainty | None]:
    """Loss positions b * S + s among the positions `mine` [S] of each row, with their targets, weights, terms, noise
    and certainty."""
    mask, which = noisy.mask[:, mine], _targets_at(noisy, mine)
    terms = None if noisy.terms is None else noisy.terms[which]
    noise = None if noisy.noise is None else noisy.noise.each(lambda tensor: tensor[which])
    return mask.flatten().nonzero()[:, 0], noisy.targets[which], noisy.weights[which], terms, noise, noisy.certainty


def _targets_at(noisy: NoisyBatch, mine: torch.Tensor) -> torch.Tensor:
    """[M] int64 indices into `noisy.targets` for the positions `mine` [S] of each row, row by row."""
    number = (noisy.mask.flatten().cumsum(0) - 1).view_as(noisy.mask)
    return number[:, mine][noisy.mask[:, mine]]


def _predictions(noisy: NoisyBatch, mine: torch.Tensor, depths: int) -> tuple[Prediction, ...]:
    """Predictions of depth 1 to `depths` at the positions `mine` [S] of each row; beyond its end the token is 0."""
    if depths == 0:
        return ()
    if noisy.mask_descriptor is not None:
        documents = noisy.mask_descriptor.codes[..., MaskColumn.DOCUMENT]
    else:
        real = noisy.attention_mask
        documents = document_ids(torch.ones_like(noisy.input_ids) if real is None else real)
    documents = documents.expand_as(noisy.input_ids)
    number = (noisy.mask.flatten().cumsum(0) - 1).view_as(noisy.mask)  # of each position in `targets`
    found = []
    for depth in range(1, depths + 1):
        same = _from_later(documents, depth, -1) == documents  # every padding token has a negative number of its own
        mask = (_from_later(noisy.mask, depth, 0) & same & (documents >= 0))[:, mine]
        which = _from_later(number, depth, 0)[:, mine][mask]
        ids = _from_later(noisy.input_ids, depth, 0)[:, mine]
        positions = mask.flatten().nonzero()[:, 0]
        found.append(Prediction(ids, positions, noisy.targets[which], noisy.weights[which]))
    return tuple(found)


def _from_later(values_BL: torch.Tensor, depth: int, beyond: int) -> torch.Tensor:
    """Values of the position `depth` later; `beyond` after the row's end."""
    return torch.nn.functional.pad(values_BL[:, depth:], (0, min(depth, values_BL.shape[1])), value=beyond)


def _padded(batch: MicroBatch, most: int) -> MicroBatch:
    """Pad the loss positions of the batch, and of each depth, to a bucket size."""
    more = [name for name in ("terms", "rows") if getattr(batch, name) is not None]
    names = ("loss_positions", "targets", "weights", *more)
    pad = _bucket_padding(batch.loss_positions, most)
    padded: dict[str, Any] = {name: pad(getattr(batch, name)) for name in names}
    if batch.noise is not None:
        padded["noise"] = batch.noise.each(pad)
    return dataclasses.replace(batch, **padded, predictions=tuple(_padded_depth(p, most) for p in batch.predictions))


def _padded_depth(prediction: Prediction, most: int) -> Prediction:
    pad = _bucket_padding(prediction.loss_positions, most)
    names = ("loss_positions", "targets", "weights")
    return dataclasses.replace(prediction, **{name: pad(getattr(prediction, name)) for name in names})


def _bucket_padding(positions_M: torch.Tensor, most: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function that pads a tensor [M] to the bucket size of `positions_M`."""
    more = loss_bucket(len(positions_M), most) - len(positions_M)
    return lambda tensor: torch.nn.functional.pad(tensor, (0, more))


def rank_positions(length: int, cp_size: int, streams: int = 1) -> torch.Tensor:
    """[cp, S] the positions of a row of `length` on each context parallel rank, in Transformer Engine's order: of
    2 cp equal chunks rank r has chunks r and 2 cp - 1 - r, which balances causal attention. Each of several streams,
    one after the other, is split separately.

    Raises LayoutError if the chunks are not equal.
    """
    chunks = 2 * cp_size if cp_size > 1 else 1
    if length % (streams * chunks):
        raise LayoutError(
            "seq_length",
            f"{length // streams} is not a multiple of {chunks}, the number of chunks with `cp={cp_size}`",
        )
    if cp_size == 1:
        return torch.arange(length)[None]
    split = torch.arange(length).view(streams, chunks, -1)
    first = torch.arange(cp_size)
    return torch.stack((split[:, first], split[:, chunks - 1 - first]), dim=2).transpose(0, 1).reshape(cp_size, -1)
