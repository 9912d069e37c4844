"""A legacy checkpoint's ranks as one model: each rank's tensor is a chunk of the global one, read where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dlm_bridge.convert.formats.dcp import Chunk, Contents, Place, StoredTensor
from dlm_bridge.convert.formats.legacy import LegacyFiles, Rank
from dlm_bridge.convert.formats.rank_names import LAYER_OF, rank_names
from dlm_bridge.convert.formats.torch_dist import ChunkedReader
from dlm_bridge.convert.formats.torch_file import FileTensor
from dlm_bridge.convert.formats.torch_items import TensorItem
from dlm_bridge.convert.mapping import Link, Vocabulary
from dlm_bridge.convert.streaming import Region
from dlm_bridge.convert.tensors import WEIGHT_DTYPES, dtype_name, read_tensor, same_bits
from dlm_bridge.errors import DlmBridgeError

_COMPARED = 1 << 20  # bytes; copies up to this size are compared whenever they are read, larger ones by `verify`


class LegacyReader(ChunkedReader):
    """The tensors of `links`, global and unsharded, under their `Link.megatron_name`.

    Raises DlmBridgeError for a tensor whose ranks do not agree in shape or dtype, and for parameters of no link.
    """

    def __init__(self, files: LegacyFiles, links: Iterable[Link], tied: bool) -> None:
        self._files, self._tied = files, tied
        self._holders: dict[tuple[int, int | None], list[Rank]] = {}  # by stage, and by expert rank or all of them
        for (_, pp, ep), rank in sorted(files.ranks.items()):
            self._holders.setdefault((pp, None), []).append(rank)
            self._holders.setdefault((pp, ep), []).append(rank)
        self._layers = _layer_starts(files)
        self._used: set[tuple[int, int, str]] = set()  # (stage, chunk, name)
        self.copies: dict[str, list[tuple[FileTensor, FileTensor]]] = {}
        tensors = {}
        for link in links:
            stored = self._store(link)
            if stored is not None:
                tensors[link.megatron_name] = stored
        self._check_all_used()
        super().__init__(files.folder, Contents(tensors, {}), files.common)

    def read_into(self, key: str, stack: tuple[int, ...], out: torch.Tensor) -> None:
        self._compare_small(key)
        super().read_into(key, stack, out)

    def regions(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> list[Region]:
        self._compare_small(key)
        return super().regions(key, stack, shape)

    def check_copies(self) -> list[tuple[str, str]]:
        """(tensor, what is wrong) of every parameter that several ranks hold and that is not the same in all."""
        found = []
        for key, pairs in self.copies.items():
            for first, other in pairs:
                try:
                    self._compare(key, first, other)
                except DlmBridgeError as error:
                    found.append((key, str(error)))
        return found

    def _compare_small(self, key: str) -> None:
        for first, other in self.copies.get(key, []):
            if first.nbytes <= _COMPARED:
                self._compare(key, first, other)

    def _compare(self, key: str, first: FileTensor, other: FileTensor) -> None:
        a, b = (read_tensor(t.path, t.offset, t.dtype, t.shape) for t in (first, other))
        if not same_bits(a, b):
            raise DlmBridgeError(f"{other.path}: {key} differs from that of {first.path.parent.name}, its copy")

    def _item(self, key: str, tensor: StoredTensor, chunk: Chunk) -> TensorItem:
        assert tensor.dtype is not None
        return TensorItem(self.folder / chunk.place.file, tensor.dtype, chunk.sizes, chunk.place.offset)

    def _store(self, link: Link) -> StoredTensor | None:
        """A link's tensor in the chunks that the ranks hold, None where no rank has it."""
        where = self._find(link)
        if where is None:
            return None
        pp, vp, name, ep = where
        pieces: list[tuple[int, int, FileTensor, str]] = []  # rank, of how many, tensor, file
        holders = self._holders[pp, ep]
        split = link.rule.tp_axis is not None
        size = self._expert_tp(link, holders, vp, name) if ep is not None else self._files.tp
        seen: dict[int, FileTensor] = {}
        for rank in holders:
            number = rank.tp % size if split else 0
            tensor = rank.chunks[vp].get(name)
            if tensor is None:
                raise DlmBridgeError(
                    f"{self._files.folder / rank.file}: {name} is missing, which {holders[0].name} has"
                )
            if number in seen:
                if seen[number].shape != tensor.shape or seen[number].dtype != tensor.dtype:
                    raise DlmBridgeError(
                        f"{self._files.folder / rank.file}: {name} is {list(tensor.shape)}, "
                        f"{seen[number].path.parent.name} has {list(seen[number].shape)}"
                    )
                self.copies.setdefault(link.megatron_name, []).append((seen[number], tensor))
                continue
            seen[number] = tensor
            pieces.append((number, size if split else 1, tensor, rank.file))
        missing = set(range(size if split else 1)) - seen.keys()
        if missing:
            of_expert = "" if ep is None else f"expert parallel rank {ep}, "
            raise DlmBridgeError(
                f"{self._files.folder}: {link.megatron_name}: the folder of {of_expert}stage {pp}, tensor parallel "
                f"rank {min(missing)} of {size} is missing"
            )
        return _put_together(link, pieces)

    def _find(self, link: Link) -> tuple[int, int, str, int | None] | None:
        """(stage, chunk, name in the rank, expert parallel rank) of a link."""
        ep, expert = None, link.expert
        if expert is not None:
            share = max(1, link.dims.experts // self._files.ep)
            ep, expert = expert // share, expert % share
        if link.layer is not None and not link.is_mtp:
            place = self._layers.get(link.layer)
            places = [] if place is None else [place]
        else:
            stages = [(p, v, 0) for v in range(self._files.vp) for p in range(self._files.pp)]
            places = stages if link.rule.megatron.startswith("embedding.") else stages[::-1]
        mtp = link.layer - link.dims.layers if link.layer is not None and link.is_mtp else None
        for pp, vp, local in places:
            for name in rank_names(link.rule.megatron, local, expert, mtp):
                if name in self._holders[pp, ep][0].chunks[vp]:
                    self._used.add((pp, vp, name))
                    return pp, vp, name, ep
        return None

    def _expert_tp(self, link: Link, holders: list[Rank], vp: int, name: str) -> int:
        """How many ranks one expert is split over, by the rows or columns that one of them has."""
        axis = link.rule.tp_axis
        if axis is None:
            return 1
        tensor = holders[0].chunks[vp].get(name)
        whole = link.megatron_shape[axis]
        part = tensor.shape[axis] if tensor is not None and len(tensor.shape) > axis else 0
        if not part or whole % part or self._files.tp % (whole // part):
            raise DlmBridgeError(
                f"{self._files.folder / holders[0].file}: {name} has {part} of {whole} along axis {axis}, which no "
                f"expert tensor parallel size that divides the tensor parallel size {self._files.tp} gives"
            )
        return whole // part

    def _check_all_used(self) -> None:
        last = self._files.pp - 1
        copies = {"output_layer.weight"} if self._tied else set()  # the last stage has the embedding once more
        copies |= {"embedding.word_embeddings.weight"} if last else set()
        for rank in self._files.ranks.values():
            for vp, chunk in enumerate(rank.chunks):
                for name in chunk:
                    if (rank.pp, vp, name) in self._used or "_extra_state" in name:
                        continue
                    if rank.pp != last or name not in copies:
                        raise DlmBridgeError(
                            f"{self._files.folder / rank.file}: {name} is not part of a model of this config"
                        )
                    self._copy_of_embedding(rank, chunk[name])

    def _copy_of_embedding(self, rank: Rank, tensor: FileTensor) -> None:
        first = self._files.ranks.get((rank.tp, 0, rank.ep), self._files.first)
        embedding = first.chunks[0].get("embedding.word_embeddings.weight")
        if embedding is not None:
            self.copies.setdefault("embedding.word_embeddings.weight", []).append((embedding, tensor))


def _put_together(link: Link, pieces: list[tuple[int, int, FileTensor, str]]) -> StoredTensor:
    """The chunks of a link's tensor, one or (gate and up) two for each piece."""
    whole = list(link.megatron_shape)
    axis = link.rule.tp_axis
    padded = isinstance(link.rule, Vocabulary)
    if padded:
        whole[0] = sum(tensor.shape[0] for _, _, tensor, _ in pieces)
    dtypes = {tensor.dtype for _, _, tensor, _ in pieces}
    if len(dtypes) > 1:
        names = " and ".join(sorted(map(dtype_name, dtypes)))
        raise DlmBridgeError(f"{pieces[0][2].path}: {link.megatron_name} has dtype {names} on different ranks")
    chunks = []
    for number, size, tensor, file in pieces:
        if axis is None:
            runs = [(0, whole[0] if whole else 1)]
        elif padded:
            share = whole[0] // size
            runs = [(number * share, share)]
        else:
            runs = list(link.tp_slices(number, size))
        expected = list(whole)
        if axis is not None:
            expected[axis] = sum(length for _, length in runs)
        if list(tensor.shape) != expected:
            raise DlmBridgeError(
                f"{tensor.path}: {link.megatron_name} has shape {list(tensor.shape)}, tensor parallel rank {number} "
                f"of {size} asks for {expected}"
            )
        offset = tensor.offset
        for start, length in runs:
            offsets, sizes = [0] * len(whole), list(whole)
            if axis is not None:
                offsets[axis], sizes[axis] = start, length
            nbytes = torch.Size(sizes).numel() * tensor.dtype.itemsize
            chunks.append(Chunk(tuple(offsets), tuple(sizes), Place(file, offset, nbytes)))
            offset += nbytes
    name = dtype_name(pieces[0][2].dtype)
    return StoredTensor(WEIGHT_DTYPES.get(name), name, tuple(whole), tuple(chunks))


def _layer_starts(files: LegacyFiles) -> dict[int, tuple[int, int, int]]:
    """Global layer -> (stage, chunk, number within the chunk). Chunk v of every stage comes before chunk v + 1."""
    places: dict[int, tuple[int, int, int]] = {}
    for vp in range(files.vp):
        for pp in range(files.pp):
            rank = files.ranks[min(place for place in files.ranks if place[1] == pp)]
            numbers = sorted({int(match[1]) for name in rank.chunks[vp] if (match := LAYER_OF.match(name))})
            if numbers != list(range(len(numbers))):
                raise DlmBridgeError(f"{files.folder / rank.file}: its layers are numbered {numbers}, not from 0 on")
            for number in numbers:
                places[len(places)] = (pp, vp, number)
    return places
