"""Parallel layout of a model's weights (tensor, pipeline, virtual pipeline and expert parallel sizes) and of its
sequences (context parallelism), validated eagerly.

Pipeline layout strings are megatron-core's: "Et*3|(tt|)*2t*2L" cuts 9 layers into four stages of 3, 2, 2 and 2. E is
the embedding, t a transformer layer, L the loss (with the final norm and the output layer); "|" ends a stage, "x*n"
repeats one letter, "(...)*n" a group; commas are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Dims

# Of context parallelism, our names: megatron-core's.
CP_COMMUNICATION = {"p2p": "p2p", "a2a": "a2a", "allgather": "all_gather", "a2a+p2p": "a2a+p2p"}
_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_LETTER = re.compile(r"([EtmL|])\*(\d+)")
_LONGEST = 100_000  # letters, after the repeats are written out


@dataclass(frozen=True)
class Layout:
    """Parallel sizes. `first_stage`, `last_stage` or `pipeline` (megatron-core's layout string) cut unevenly.

    Raises DlmBridgeError for sizes that cannot be; `check` does so for sizes that a model cannot have.
    """

    tp: int = 1
    pp: int = 1
    vp: int = 1  # virtual pipeline chunks per pipeline rank; follows from `pipeline` where that is given
    ep: int = 1
    etp: int | None = None  # expert tensor parallel size, tp where None
    first_stage: int | None = None  # layers on the first pipeline rank, all its virtual chunks together
    last_stage: int | None = None
    pipeline: str | None = None  # such as "Et*2|t*2|t*3L"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "pipeline" and value is not None and (type(value) is not int or value < 1):
                raise DlmBridgeError(f"--{name.replace('_', '-')} must be a positive whole number, not {value!r}")
        if self.pipeline is not None:
            if self.first_stage or self.last_stage:
                raise DlmBridgeError("give either first and last stage sizes or a pipeline layout string, not both")
            object.__setattr__(self, "vp", self._vp_of_string(self.pipeline))
        if self.pp == 1 and (self.first_stage or self.last_stage):
            raise DlmBridgeError("first and last stage sizes need --pp of at least 2")
        if self.pp == 1 and self.vp > 1:
            raise DlmBridgeError(f"--vp {self.vp} needs --pp of at least 2: virtual chunks interleave pipeline stages")

    @property
    def world_size(self) -> int:
        """The fewest ranks that this layout runs on (data and context parallel sizes of one)."""
        return self.pp * math.lcm(self.tp, self.ep * self.expert_tp)

    @property
    def expert_tp(self) -> int:
        """Ranks that one expert is split over."""
        return self.tp if self.etp is None else self.etp

    def rank(self, pp_rank: int, tp_rank: int, ep_rank: int | None = None) -> int:
        """The global rank of the first data parallel replica there: Megatron counts tensor parallel ranks first.

        With `ep_rank`, of an expert's holder; `tp_rank` is then the expert tensor parallel one.
        """
        inner = tp_rank if ep_rank is None else ep_rank * self.expert_tp + tp_rank
        return pp_rank * (self.world_size // self.pp) + inner

    def stages(self, layers: int) -> list[list[list[int]]]:
        """Global layer numbers as nested lists, by pipeline parallel rank, then by virtual stage.

        Chunk v of every stage comes before chunk v + 1 of any, as Megatron interleaves them. Raises DlmBridgeError.
        """
        sizes = self._chunk_sizes(layers)
        chunks, start = [], 0
        for size in sizes:
            chunks.append(list(range(start, start + size)))
            start += size
        return [[chunks[v * self.pp + p] for v in range(self.vp)] for p in range(self.pp)]

    def check(self, dims: Dims) -> None:
        """Raise DlmBridgeError where a model of these sizes cannot be cut so; the message names what to change."""
        if not dims.experts and (self.ep > 1 or self.etp not in (None, 1, self.tp)):
            option = f"--ep {self.ep}" if self.ep > 1 else f"--etp {self.etp}"
            raise DlmBridgeError(f"{option}: the model is dense (it has no experts): leave --ep at 1 and --etp out")
        if dims.experts and dims.experts % self.ep:
            raise DlmBridgeError(
                f"--ep {self.ep} does not divide the {dims.experts} experts: {_divisors(dims.experts)}"
            )
        if dims.groups % self.tp:
            raise DlmBridgeError(
                f"--tp {self.tp} does not divide the {dims.groups} query groups (key/value heads): "
                f"{_divisors(dims.groups)}"
            )
        for what, size, option, ranks in (
            ("feed-forward size", 0 if dims.experts and not dims.dense_layers else dims.ffn, "--tp", self.tp),
            ("shared expert's size", dims.shared_ffn, "--tp", self.tp),
            ("experts' size", dims.moe_ffn, "--tp" if self.etp is None else "--etp", self.expert_tp),
        ):
            if size % ranks:
                raise DlmBridgeError(f"{option} {ranks} does not divide the {what} {size}: {_divisors(size)}")
        self.stages(dims.layers)

    def check_optimizer_instances(self, instances: int, ranks: int, fsdp: bool = False) -> None:
        """Raise DlmBridgeError where so many instances of the distributed optimizer do not divide the data parallel
        (and context parallel) ranks, or those of experts, of a run on so many `ranks`, or leave FSDP one rank each."""
        for size, what in (
            (ranks // (self.tp * self.pp), "data and context parallel ranks"),
            (ranks // (self.pp * self.ep * self.expert_tp), "data parallel ranks of experts"),
        ):
            if size % instances:
                raise DlmBridgeError(
                    f"--optimizer-instances {instances} does not divide the {size} {what}: {_divisors(size)}"
                )
            if fsdp and size == instances > 1:
                raise DlmBridgeError(
                    f"--optimizer-instances {instances}: of the {size} {what} each would be one, over "
                    "which --fsdp shards nothing: use fewer"
                )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest and for `--json`."""
        return asdict(self)

    def _vp_of_string(self, text: str) -> int:
        chunks = len(parse_layout_string(text))
        if chunks % self.pp:
            raise DlmBridgeError(f"pipeline layout '{text}' has {chunks} stages, which --pp {self.pp} does not divide")
        if self.vp not in (1, chunks // self.pp):
            raise DlmBridgeError(
                f"pipeline layout '{text}' has {chunks} stages, that is --pp {self.pp} --vp {chunks // self.pp}, "
                f"not --vp {self.vp}"
            )
        return chunks // self.pp

    def _chunk_sizes(self, layers: int) -> list[int]:
        """Layers in each of the pp * vp chunks, in the order of the layers."""
        if self.pipeline is not None:
            return chunk_layers(self.pipeline, layers)
        if layers < self.pp * self.vp:
            what = f"--pp {self.pp}" + (f" --vp {self.vp}" if self.vp > 1 else "")
            raise DlmBridgeError(f"{what} needs at least {self.pp * self.vp} layers, the model has {layers}: lower it")
        middle, ranks = layers - (self.first_stage or 0) - (self.last_stage or 0), self.pp
        ranks -= sum(size is not None for size in (self.first_stage, self.last_stage))
        if middle < ranks or (ranks == 0 and middle) or (ranks and middle % ranks):
            raise DlmBridgeError(self._uneven(layers))
        stage = [middle // ranks] * ranks if ranks else []
        stage = [*([self.first_stage] if self.first_stage else []), *stage]
        stage = [*stage, *([self.last_stage] if self.last_stage else [])]
        if any(size % self.vp for size in stage):
            raise DlmBridgeError(self._uneven(layers))
        return [size // self.vp for size in stage] * self.vp

    def _uneven(self, layers: int) -> str:
        """What is wrong, and a split that works."""
        sizes = balanced(layers, self.pp * self.vp)
        works = ",".join(map(str, sizes)) if self.vp == 1 else f"'{layout_string(sizes)}'"
        remedy = f"use --pipeline-split {works}"
        if self.first_stage or self.last_stage:
            given = f"first stage {self.first_stage or 'even'}, last stage {self.last_stage or 'even'}"
            return f"{layers} layers do not split over --pp {self.pp} --vp {self.vp} with {given}: {remedy}"
        if self.vp > 1:
            return f"{layers} layers do not divide over --pp {self.pp} x --vp {self.vp} chunks: {remedy}"
        return f"{layers} layers do not divide over --pp {self.pp} stages: {remedy}"


@dataclass(frozen=True)
class ContextParallelConfig:
    """Context parallelism: it shards sequences and not weights, so that no checkpoint depends on it.

    Raises DlmBridgeError for invalid sizes; `check` for those that do not fit a model.
    """

    cp: int = 1
    cp_comm_type: str = "p2p"  # of Transformer Engine; with mask descriptors keys and values are gathered
    hierarchical_cp_sizes: tuple[int, ...] | None = None  # (inner, outer) of a2a+p2p

    def __post_init__(self) -> None:
        if type(self.cp) is not int or self.cp < 1:
            raise DlmBridgeError(f"--cp must be a positive whole number, not {self.cp!r}")
        if self.cp_comm_type not in CP_COMMUNICATION:
            known = ", ".join(CP_COMMUNICATION)
            raise DlmBridgeError(f"--cp-comm-type {self.cp_comm_type!r} is unknown: known are {known}")
        sizes = self.hierarchical_cp_sizes
        if (self.cp_comm_type == "a2a+p2p") != (sizes is not None):
            raise DlmBridgeError(
                "--cp-comm-type a2a+p2p and --hierarchical-cp-sizes go together: give both or neither"
            )
        if sizes is not None and (len(sizes) != 2 or min(sizes) < 1 or math.prod(sizes) != self.cp):
            written = ",".join(map(str, sizes))
            raise DlmBridgeError(
                f"--hierarchical-cp-sizes {written}: two sizes are needed, inner and outer, whose product is --cp "
                f"{self.cp}"
            )

    def check(self, dims: Dims, layout: Layout) -> None:
        """Raise DlmBridgeError where the sizes do not fit a model."""
        if self.cp == 1 or self.cp_comm_type not in ("a2a", "a2a+p2p"):
            return
        ranks = self.hierarchical_cp_sizes[0] if self.hierarchical_cp_sizes else self.cp
        for what, heads in (("attention heads", dims.heads), ("query groups (key/value heads)", dims.groups)):
            if heads // layout.tp % ranks:
                raise DlmBridgeError(
                    f"--cp-comm-type {self.cp_comm_type} deals {heads // layout.tp} {what} of a tensor parallel rank "
                    f"to {ranks} ranks, which do not divide them: use p2p or allgather, or another --cp"
                )

    def world_size(self, layout: Layout) -> int:
        """The fewest ranks for both, with one data parallel replica."""
        return layout.pp * math.lcm(layout.tp * self.cp, layout.ep * layout.expert_tp)


def parse_pipeline_split(text: str, pp: int, vp: int = 1) -> dict[str, Any]:
    """The Layout fields that `--pipeline-split` means.

    "FIRST,LAST" gives the layers on the first and the last pipeline rank (the ranks between share the rest evenly);
    as many numbers as pipeline ranks give every rank's layers; anything with letters is megatron-core's layout string.
    Raises DlmBridgeError.
    """
    text = text.strip()
    if any(letter in text for letter in "EtmL|"):
        return {"pipeline": text}
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise DlmBridgeError(
            f"--pipeline-split {text}: write FIRST,LAST, or one number per pipeline stage, or a layout string "
            "such as 'Et*3|t*3|t*2L'"
        ) from None
    if any(size < 1 for size in sizes):
        raise DlmBridgeError(f"--pipeline-split {text}: every stage needs at least one layer")
    if len(sizes) == 2:
        return {"first_stage": sizes[0], "last_stage": sizes[1]}
    if len(sizes) != pp:
        raise DlmBridgeError(
            f"--pipeline-split {text}: {len(sizes)} numbers for --pp {pp}: write two (first and last stage) or {pp}"
        )
    if any(size % vp for size in sizes):
        raise DlmBridgeError(f"--pipeline-split {text}: --vp {vp} must divide every stage's layers")
    return {"pipeline": layout_string([size // vp for size in sizes] * vp)}


def _divisors(number: int) -> str:
    return "choose one of " + ", ".join(str(n) for n in range(1, min(number, 512) + 1) if number % n == 0)


def parse_layout_string(text: str) -> list[str]:
    """The letters of each stage, in order of the layers. Raises DlmBridgeError."""

    def repeat(match: re.Match[str]) -> str:
        times = int(match[2]) if len(match[2]) < 7 else _LONGEST + 1
        if times * len(match[1]) > _LONGEST:
            raise DlmBridgeError(f"pipeline layout '{text}': too many layers")
        return match[1] * times

    flat = _LETTER.sub(repeat, _GROUP.sub(repeat, text.replace(",", "")))
    wrong = re.search(r"[^EtmL|]", flat)
    if wrong:
        raise DlmBridgeError(f"pipeline layout '{text}': '{wrong[0]}' is not one of E, t, L, | and x*n or (...)*n")
    if "m" in flat:
        raise DlmBridgeError(f"pipeline layout '{text}': the model has no multi-token prediction layers (m)")
    letters = flat.replace("|", "")
    if not letters.startswith("E") or not letters.endswith("L") or letters.count("E") + letters.count("L") != 2:
        raise DlmBridgeError(f"pipeline layout '{text}': it must start with one E and end with one L")
    return flat.split("|")


def chunk_layers(text: str, layers: int) -> list[int]:
    """Layers in each stage of the string. Raises DlmBridgeError where they are not `layers` in all."""
    sizes = [stage.count("t") for stage in parse_layout_string(text)]
    if sum(sizes) != layers:
        proposal = layout_string(balanced(layers, len(sizes)))
        raise DlmBridgeError(
            f"pipeline layout '{text}' has {sum(sizes)} layers, the model has {layers}: use '{proposal}'"
        )
    return sizes


def layout_string(sizes: Sequence[int]) -> str:
    """The string that cuts into stages of these many layers."""
    stages = ["t" * size if size < 2 else f"t*{size}" for size in sizes]
    return "E" + "|".join(stages) + "L"


def balanced(layers: int, parts: int) -> list[int]:
    """`layers` in `parts` sizes that differ by one at the most, the larger first."""
    return [layers // parts + (part < layers % parts) for part in range(parts)]
