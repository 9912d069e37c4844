"""Parallel layout of a model's weights (tensor, pipeline, virtual pipeline and expert parallel sizes) and of its
sequences (context parallelism), validated on construction.

Pipeline layout strings are megatron-core's: "Et*3|(tt|)*2t*2L" splits 9 layers into four stages of 3, 2, 2 and 2. E is
the embedding, t a transformer layer, L the loss (with the final norm and the output layer); "|" ends a stage, "x*n"
repeats one letter, "(...)*n" a group; commas are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlm_bridge.errors import LayoutError, SettingError, counted
from dlm_bridge.mapping.rules import QUERY_GROUPS, Dims, check_divides
from dlm_bridge.settings import check_choice

# Values of `cp_comm_type`: megatron-core's names.
CP_COMMUNICATION = {"p2p": "p2p", "a2a": "a2a", "allgather": "all_gather", "a2a+p2p": "a2a+p2p"}
_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_LETTER = re.compile(r"([EtmL|])\*(\d+)")
_LONGEST = 100_000  # letters of an expanded layout string
SPLIT = "pipeline_split"  # the field of errors about an uneven pipeline


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a model's weights.

    `check` validates them against a model. Errors about an uneven pipeline have the field `pipeline_split`.

    Args:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        vp: virtual pipeline chunks per pipeline rank; follows from `pipeline` if that is set.
        ep: expert parallel size.
        etp: expert tensor parallel size; None: `tp`.
        first_stage: layers on the first pipeline rank, in all its virtual chunks; the rest is split evenly.
        last_stage: layers on the last pipeline rank.
        pipeline: megatron-core's layout string, such as "Et*2|t*2|t*3L".

    Raises:
        SettingError: invalid or contradictory sizes.
        LayoutError: `pipeline` does not fit `pp` or `vp`.
    """

    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int | None = None
    first_stage: int | None = None
    last_stage: int | None = None
    pipeline: str | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "pipeline" and value is not None and (type(value) is not int or value < 1):
                raise SettingError(name, f"must be a positive whole number, not {value!r}")
        if self.pipeline is not None:
            if self.first_stage or self.last_stage:
                raise SettingError(SPLIT, "is either the sizes of the first and last stage or a layout string")
            object.__setattr__(self, "vp", self._vp_of_string(self.pipeline))
        if self.pp == 1 and (self.first_stage or self.last_stage):
            raise SettingError(SPLIT, "needs a pipeline: `pp` of at least 2")
        if self.pp == 1 and self.vp > 1:
            raise SettingError("vp", f"{self.vp} needs `pp` of at least 2: virtual chunks interleave pipeline stages")

    @property
    def world_size(self) -> int:
        """Minimum number of ranks (with data and context parallel sizes of 1)."""
        return self.pp * math.lcm(self.tp, self.ep * self.expert_tp)

    @property
    def expert_tp(self) -> int:
        """Number of ranks that one expert is split over."""
        return self.tp if self.etp is None else self.etp

    def rank(self, pp_rank: int, tp_rank: int, ep_rank: int | None = None) -> int:
        """Global rank in the first data parallel replica; Megatron numbers tensor parallel ranks first.

        With `ep_rank`, the rank of an expert, and `tp_rank` is the expert tensor parallel rank.
        """
        inner = tp_rank if ep_rank is None else ep_rank * self.expert_tp + tp_rank
        return pp_rank * (self.world_size // self.pp) + inner

    def stages(self, layers: int) -> list[list[list[int]]]:
        """Global layer numbers as nested lists, indexed by pipeline rank and virtual chunk.

        Chunk v of every stage precedes chunk v + 1 of any stage, as in Megatron's interleaved schedule. Raises
        LayoutError if the layers cannot be split.
        """
        sizes = self._chunk_sizes(layers)
        chunks, start = [], 0
        for size in sizes:
            chunks.append(list(range(start, start + size)))
            start += size
        return [[chunks[v * self.pp + p] for v in range(self.vp)] for p in range(self.pp)]

    def check(self, dims: Dims) -> None:
        """Raise LayoutError if a model of these sizes does not fit the layout; the reason lists sizes that do."""
        if not dims.experts and (self.ep > 1 or self.etp not in (None, 1, self.tp)):
            raise LayoutError("ep" if self.ep > 1 else "etp", "the model has no experts: leave `ep` and `etp` out")
        for field, ranks, what, size in (
            ("ep", self.ep, "experts", dims.experts),
            ("tp", self.tp, QUERY_GROUPS, dims.groups),
            ("tp", self.tp, "rows of the MLP", 0 if dims.experts and not dims.dense_layers else dims.ffn),
            ("tp", self.tp, "rows of the shared expert", dims.shared_ffn),
            ("tp" if self.etp is None else "etp", self.expert_tp, "rows of an expert", dims.moe_ffn),
        ):
            check_divides(field, ranks, size, what)
        self.stages(dims.layers)

    def check_optimizer_instances(self, instances: int, ranks: int, fsdp: bool = False) -> None:
        """Raise LayoutError if `instances` of the distributed optimizer do not divide the data (and context) parallel
        ranks of a run on `ranks` ranks, or of its experts, or if FSDP would shard over one rank."""
        for size, what in (
            (ranks // (self.tp * self.pp), "data and context parallel ranks"),
            (ranks // (self.pp * self.ep * self.expert_tp), "data parallel ranks of experts"),
        ):
            check_divides("optimizer_instances", instances, size, what)
            if fsdp and size == instances > 1:
                raise LayoutError(
                    "optimizer_instances",
                    f"{instances} leaves one of the {size} {what} per instance, and `fsdp` shards over the ranks of "
                    "an instance: use fewer",
                )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest and for JSON output."""
        return asdict(self)

    def _vp_of_string(self, text: str) -> int:
        chunks = len(parse_layout_string(text))
        if chunks % self.pp or self.vp not in (1, chunks // self.pp):
            raise LayoutError(
                SPLIT,
                f"'{text}' has {counted(chunks, 'stage')}, which must be `pp={self.pp}` times `vp` (may be left out)",
            )
        return chunks // self.pp

    def _chunk_sizes(self, layers: int) -> list[int]:
        """Number of layers in each of the pp * vp chunks, in the order of the layers."""
        if self.pipeline is not None:
            return chunk_layers(self.pipeline, layers)
        if layers < self.pp * self.vp:
            what = f"{self.pp}" + (f" with `vp={self.vp}`" if self.vp > 1 else "")
            raise LayoutError(
                "pp", f"{what} needs at least {counted(self.pp * self.vp, 'layer')}, the model has {layers}: lower it"
            )
        middle, ranks = layers - (self.first_stage or 0) - (self.last_stage or 0), self.pp
        ranks -= sum(size is not None for size in (self.first_stage, self.last_stage))
        if middle < ranks or (ranks == 0 and middle) or (ranks and middle % ranks):
            raise self._uneven(layers)
        stage = [middle // ranks] * ranks if ranks else []
        stage = [*([self.first_stage] if self.first_stage else []), *stage]
        stage = [*stage, *([self.last_stage] if self.last_stage else [])]
        if any(size % self.vp for size in stage):
            raise self._uneven(layers)
        return [size // self.vp for size in stage] * self.vp

    def _uneven(self, layers: int) -> LayoutError:
        """Error for a split that does not fit `layers`, with one that does."""
        sizes = balanced(layers, self.pp * self.vp)
        fits = ",".join(map(str, sizes)) if self.vp == 1 else f"'{layout_string(sizes)}'"
        over = f"`pp={self.pp}`" + (f" and `vp={self.vp}`" if self.vp > 1 else "")
        if self.first_stage or self.last_stage:
            given = f"first stage {self.first_stage or 'even'}, last stage {self.last_stage or 'even'}"
            return LayoutError(SPLIT, f"{given} does not split {counted(layers, 'layer')} over {over}: use {fits}")
        return LayoutError("pp", f"{counted(layers, 'layer')} do not divide evenly over {over}: use `{SPLIT}={fits}`")


@dataclass(frozen=True)
class ContextParallelConfig:
    """Context parallelism, which shards sequences, not weights; checkpoints do not depend on it.

    Raises SettingError for invalid or contradictory sizes; `check` validates them against a model.

    Args:
        cp: context parallel size.
        cp_comm_type: Transformer Engine's communication; with mask descriptors, keys and values are gathered.
        hierarchical_cp_sizes: (inner, outer) sizes of a2a+p2p.
    """

    cp: int = 1
    cp_comm_type: str = "p2p"
    hierarchical_cp_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.cp) is not int or self.cp < 1:
            raise SettingError("cp", f"must be a positive whole number, not {self.cp!r}")
        check_choice("cp_comm_type", self.cp_comm_type, CP_COMMUNICATION)
        sizes = self.hierarchical_cp_sizes
        if (self.cp_comm_type == "a2a+p2p") != (sizes is not None):
            raise SettingError("hierarchical_cp_sizes", "is needed with `cp_comm_type=a2a+p2p`, and only then")
        if sizes is not None and (len(sizes) != 2 or min(sizes) < 1 or math.prod(sizes) != self.cp):
            written = ",".join(map(str, sizes))
            raise SettingError(
                "hierarchical_cp_sizes",
                f"{written} must be two sizes, inner and outer, with the product `cp={self.cp}`",
            )

    def check(self, dims: Dims, layout: Layout) -> None:
        """Raise LayoutError if the sizes do not fit a model."""
        if self.cp == 1 or self.cp_comm_type not in ("a2a", "a2a+p2p"):
            return
        ranks = self.hierarchical_cp_sizes[0] if self.hierarchical_cp_sizes else self.cp
        for what, heads in (("attention heads", dims.heads), (QUERY_GROUPS, dims.groups)):
            if heads // layout.tp % ranks:
                raise LayoutError(
                    "cp_comm_type",
                    f"{self.cp_comm_type} distributes {heads // layout.tp} {what} of a tensor parallel rank over "
                    f"{ranks} ranks, which does not divide them: use p2p or allgather, or another `cp`",
                )

    def world_size(self, layout: Layout) -> int:
        """Minimum number of ranks for both, with one data parallel replica."""
        return layout.pp * math.lcm(layout.tp * self.cp, layout.ep * layout.expert_tp)


def parse_pipeline_split(text: str, pp: int, vp: int = 1) -> dict[str, Any]:
    """Parse the setting `pipeline_split` into fields of Layout.

    "FIRST,LAST" is the number of layers on the first and the last pipeline rank (the others share the rest evenly);
    `pp` numbers are the layers of every pipeline rank; a text with letters is megatron-core's layout string.

    Raises SettingError for any other text, LayoutError for numbers that do not fit `pp` or `vp`.
    """
    text = text.strip()
    if any(letter in text for letter in "EtmL|"):
        return {"pipeline": text}
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise SettingError(
            SPLIT,
            f"{text} is neither FIRST,LAST nor one number per pipeline stage nor a layout string such as "
            "'Et*3|t*3|t*2L'",
        ) from None
    if any(size < 1 for size in sizes):
        raise SettingError(SPLIT, f"{text}: every stage needs at least one layer")
    if len(sizes) == 2:
        return {"first_stage": sizes[0], "last_stage": sizes[1]}
    if len(sizes) != pp:
        raise LayoutError(SPLIT, f"{text} must be two numbers (first and last stage), or {pp} for `pp={pp}`")
    if any(size % vp for size in sizes):
        raise LayoutError(SPLIT, f"{text}: `vp={vp}` must divide the layers of every stage")
    return {"pipeline": layout_string([size // vp for size in sizes] * vp)}


def parse_layout_string(text: str) -> list[str]:
    """Letters of each stage, in the order of the layers. Raises SettingError."""

    def repeat(match: re.Match[str]) -> str:
        times = int(match[2]) if len(match[2]) < 7 else _LONGEST + 1
        if times * len(match[1]) > _LONGEST:
            raise SettingError(SPLIT, f"'{text}' has too many layers")
        return match[1] * times

    flat = _LETTER.sub(repeat, _GROUP.sub(repeat, text.replace(",", "")))
    wrong = re.search(r"[^EtmL|]", flat)
    if wrong:
        raise SettingError(SPLIT, f"'{text}': '{wrong[0]}' is not one of E, t, L, | and x*n or (...)*n")
    if "m" in flat:
        raise SettingError(SPLIT, f"'{text}': multi-token prediction layers (m) cannot be placed")
    letters = flat.replace("|", "")
    if not letters.startswith("E") or not letters.endswith("L") or letters.count("E") + letters.count("L") != 2:
        raise SettingError(SPLIT, f"'{text}' must start with one E and end with one L")
    return flat.split("|")


def chunk_layers(text: str, layers: int) -> list[int]:
    """Number of layers in each stage of a layout string. Raises LayoutError if their sum is not `layers`."""
    sizes = [stage.count("t") for stage in parse_layout_string(text)]
    if sum(sizes) != layers:
        proposal = layout_string(balanced(layers, len(sizes)))
        raise LayoutError(
            SPLIT, f"'{text}' has {counted(sum(sizes), 'layer')}, the model has {layers}: use '{proposal}'"
        )
    return sizes


def layout_string(sizes: Sequence[int]) -> str:
    """Layout string for stages with `sizes` layers."""
    stages = ["t" * size if size < 2 else f"t*{size}" for size in sizes]
    return "E" + "|".join(stages) + "L"


def balanced(layers: int, parts: int) -> list[int]:
    """Split `layers` into `parts` sizes that differ by at most one, the larger first."""
    return [layers // parts + (part < layers % parts) for part in range(parts)]
