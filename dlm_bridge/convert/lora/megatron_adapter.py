"""Adapter weights as a torch_dist checkpoint, in the keys of Megatron Bridge's PEFT: written, and read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from dlm_bridge.convert.atomic import atomic_output
from dlm_bridge.convert.checkpoint import Checkpoint, first_of
from dlm_bridge.convert.formats.torch_dist import TRACKER, TorchDistReader, iteration_folder
from dlm_bridge.convert.formats.torch_dist_writer import TorchDistWriter, plan_torch_dist
from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.lora.adapter import PARTS, Adapter, AdapterFacts, Part, check_shapes
from dlm_bridge.convert.lora.peft_folder import CONFIG, body_names, check_all_layers, plain_config
from dlm_bridge.convert.lora.table import STYLES, Factor, Style, factors, possible_factors
from dlm_bridge.convert.megatron_checkpoint import HUB_FOLDER, is_extra_state, is_training_state
from dlm_bridge.convert.side_files import copy_files, list_side_files
from dlm_bridge.convert.streaming import tensor_bands
from dlm_bridge.convert.tensors import WEIGHT_DTYPES, digest, dtype_name
from dlm_bridge.errors import DlmBridgeError, one_line

FILE_NAME = "dlm_bridge_adapter.json"
RUN_CONFIG = "run_config.yaml"  # Megatron Bridge's
_ITERATION = "iter_0000000"
_VERSION = 1


@dataclass
class AdapterReport:
    """What was written."""

    source: str
    output: str
    base: str
    style: str
    rank: int
    alpha: float
    tensors: int
    parameters: int
    dtype: str
    layout: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def write_megatron_adapter(
    adapter: Adapter,
    base: Checkpoint,
    output: Path,
    layout: Layout,
    style: str = "auto",
    overwrite: bool = False,
) -> AdapterReport:
    """Write `adapter` of `base` cut by `layout`. `style` is canonical, fused, or auto: fused where every fused layer's
    weights share A, else canonical. Raises DlmBridgeError."""
    facts = adapter.facts
    if base.mapping.hub_only:
        raise DlmBridgeError(f"{base.where}: {base.mapping.hub_only}")
    layout.check(base.dims)
    check_all_layers(base, facts.modules, facts.where)
    chosen = _style(adapter, base, style)
    pieces = factors(base, facts.modules, facts.rank, chosen, facts.where)
    for rule, dims in {(piece.link.rule, piece.link.dims) for piece in pieces}:
        rule.check_tp(layout.tp, dims)
    plan = plan_torch_dist([p.link for p in pieces], layout, {p.link.megatron_key: facts.dtype for p in pieces})
    sources = [*base.folders(), *([facts.folder] if facts.folder else [])]
    with atomic_output(output, sources, overwrite, sum(plan.files.values())) as folder:
        writer = TorchDistWriter(folder / _ITERATION, plan)
        digests = {}
        for piece in pieces:
            tensors = _read(adapter, piece)
            for name, tensor in zip(piece.link.hub_names, tensors, strict=True):
                digests[name] = digest(tensor)
            bands = tensor_bands(piece.link.to_megatron(tensors).contiguous())
            writer.note(piece.link, writer.write(piece.link, bands))
        writer.finish(0)
        (folder / HUB_FOLDER).mkdir()
        if facts.folder is not None:
            copy_files(facts.folder, facts.files, folder / HUB_FOLDER)
        manifest = {
            "format_version": _VERSION,
            "family": base.family.name,
            "base": base.hub.source,
            "style": chosen,
            "rank": facts.rank,
            "alpha": facts.alpha,
            # Megatron scales with alpha / dim; this is its alpha for the same product (rank-stabilised LoRA's too).
            "megatron_alpha": facts.scale * facts.rank,
            "dtype": dtype_name(facts.dtype),
            "layout": layout.as_dict(),
            "modules": facts.modules,
            "adapter_config": facts.config,
            "tensors": digests,
        }
        (folder / FILE_NAME).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", "utf-8")
        (folder / TRACKER).write_text("0")
    return AdapterReport(
        source=facts.where,
        output=str(output),
        base=base.where,
        style=chosen,
        rank=facts.rank,
        alpha=facts.scale * facts.rank,
        tensors=len({piece.link.megatron_key for piece in pieces}),
        parameters=sum(piece.link.megatron_shape[0] * piece.link.megatron_shape[1] for piece in pieces),
        dtype=dtype_name(facts.dtype),
        layout=layout.as_dict(),
    )


def is_megatron_adapter(path: Path) -> bool:
    """Whether a folder is an adapter of this toolkit's, or a Megatron checkpoint that may hold one of Bridge's."""
    return (path / FILE_NAME).is_file() or (path / TRACKER).is_file() or (path / ".metadata").is_file()


class MegatronAdapter(Adapter):
    """An adapter checkpoint, this toolkit's or Megatron Bridge's (its run_config.yaml says alpha), of `base`.

    Raises DlmBridgeError for another model's, for one that is not whole, and for tensors that are no adapter's.
    """

    def __init__(self, path: Path, base: Checkpoint) -> None:
        folder = iteration_folder(path)
        where = str(path)
        self._reader = TorchDistReader(folder)
        manifest = _manifest(path / FILE_NAME)
        known = {key: tensor for key, tensor in self._reader.contents.tensors.items() if not is_training_state(key)}
        rank = _rank(known, where)
        self._places: dict[tuple[str, str], tuple[Factor, int]] = {}
        used: dict[str, Style] = {}
        for style, factor in possible_factors(base, rank):
            key = factor.link.megatron_key
            if key not in known:
                continue
            self._check(factor, where)
            used[key] = style
            for number, weight in enumerate(factor.weights):
                self._places[weight, factor.part] = (factor, 0 if factor.shared else number)
        extra = known.keys() - used.keys()
        objects = [
            key for key in self._reader.contents.objects if not is_extra_state(key) and not is_training_state(key)
        ]
        if extra or objects:
            raise DlmBridgeError(
                f"{where}: {first_of([*extra, *objects])} is no adapter weight of a {base.family.name} model"
            )
        weights = list(dict.fromkeys(weight for weight, _ in self._places))
        for weight in weights:
            if any((weight, part) not in self._places for part in PARTS):
                raise DlmBridgeError(f"{where}: one of the two factors of {weight} is missing")
            (rows, columns) = base.spec(weight)[1]
            check_shapes(base, weight, (rank, columns), (rows, rank), rank, where)
        self.style: Style = "fused" if "fused" in used.values() else "canonical"
        dtypes = {known[key].dtype for key in used}
        if len(dtypes) != 1 or None in dtypes:
            raise DlmBridgeError(f"{where}: its tensors are of several dtypes")
        self.facts = _facts(path, folder, manifest, base, rank, weights, dtypes.pop())

    def tensor(self, weight: str, part: Part) -> torch.Tensor:
        factor, number = self._places[weight, part]
        link = factor.link
        stack = tuple(index for index, _ in link.stack)
        return link.to_hub(self._reader.read(link.megatron_key, stack, link.megatron_shape))[number].contiguous()

    def _check(self, factor: Factor, where: str) -> None:
        link = factor.link
        wanted = (*(size for _, size in link.stack), *link.megatron_shape)
        found = self._reader.tensor(link.megatron_key).shape
        if found != wanted:
            raise DlmBridgeError(
                f"{where}: tensor {link.megatron_key} has shape {list(found)}, an adapter of this base has "
                f"{list(wanted)}: it is another model's"
            )
        self._reader.check_tiled(link.megatron_key)


def _style(adapter: Adapter, base: Checkpoint, asked: str) -> Style:
    if asked not in STYLES:
        raise DlmBridgeError(f"--style {asked}: choose one of {', '.join(STYLES)}")
    if asked == "canonical":
        return "canonical"
    for link in base.links:
        changed = [name for name in link.hub_names if name in adapter.facts.modules]
        if len(link.hub_names) < 2 or not changed:
            continue
        reason = None
        if len(changed) < len(link.hub_names):
            missing = next(name for name in link.hub_names if name not in changed)
            reason = f"the adapter leaves {missing} as it is"
        else:
            first, *others = (adapter.tensor(name, "A") for name in changed)
            if not all(torch.equal(first, other) for other in others):
                reason = f"{' and '.join(changed)} have different A, and one fused LoRA has one"
        if reason and asked == "fused":
            raise DlmBridgeError(f"{adapter.facts.where}: {reason}: use --style canonical")
        if reason:
            return "canonical"
    return "fused"


def _read(adapter: Adapter, piece: Factor) -> list[torch.Tensor]:
    """The Hub tensors of a factor's link."""
    weights = piece.weights[:1] if piece.shared else piece.weights
    return [adapter.tensor(weight, piece.part) for weight in weights]


def _rank(known: dict[str, Any], where: str) -> int:
    inner = [tensor.shape for key, tensor in known.items() if key.endswith(".linear_in.weight")]
    ranks = {shape[-2] for shape in inner if len(shape) >= 2}
    if len(ranks) != 1:
        what = "holds no adapter weight" if not inner else f"its adapters have ranks {sorted(ranks)}, one is needed"
        raise DlmBridgeError(f"{where}: {what}")
    return int(ranks.pop())


def _facts(
    path: Path,
    folder: Path,
    manifest: dict[str, Any] | None,
    base: Checkpoint,
    rank: int,
    weights: Iterable[str],
    dtype: torch.dtype | None,
) -> AdapterFacts:
    assert dtype is not None
    if manifest is None:
        alpha = _bridge_alpha(folder, path)
        modules = {name: body.removesuffix(".weight") for name, body in body_names(base.family, weights).items()}
        config = plain_config(rank, alpha, modules.values(), base.hub.source.get("name"))
        return AdapterFacts(str(path), rank, alpha, alpha / rank, dtype, modules, config)
    if manifest["rank"] != rank or set(manifest["modules"]) != set(weights):
        raise DlmBridgeError(f"{path}: {FILE_NAME} and the weights do not agree")
    hub = path / HUB_FOLDER
    files = list_side_files(hub, set()).carried if hub.is_dir() else ()
    return AdapterFacts(
        where=str(path),
        rank=rank,
        alpha=manifest["alpha"],
        scale=manifest["megatron_alpha"] / rank,
        dtype=WEIGHT_DTYPES.get(manifest["dtype"], dtype),
        modules=manifest["modules"],
        config=manifest["adapter_config"],
        folder=hub if CONFIG in files else None,
        files=files,
    )


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DlmBridgeError(f"{path}: cannot be read: {one_line(error)}") from None
    wanted = {
        "rank": int,
        "alpha": float,
        "megatron_alpha": float,
        "modules": dict,
        "adapter_config": dict,
        "dtype": str,
    }
    if not isinstance(value, dict) or value.get("format_version") != _VERSION:
        raise DlmBridgeError(f"{path}: is not an adapter's manifest of version {_VERSION}")
    for key, kind in wanted.items():
        if not isinstance(value.get(key), kind):
            raise DlmBridgeError(f"{path}: '{key}' is missing or of the wrong kind")
    return value


def _bridge_alpha(folder: Path, path: Path) -> float:
    """`peft.alpha` of Megatron Bridge's run_config.yaml."""
    for file in (folder / RUN_CONFIG, path / RUN_CONFIG):
        if not file.is_file():
            continue
        try:
            settings = yaml.safe_load(file.read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DlmBridgeError(f"{file}: cannot be read: {one_line(error)[:200]}") from None
        peft = settings.get("peft") if isinstance(settings, dict) else None
        alpha = peft.get("alpha") if isinstance(peft, dict) else None
        if not isinstance(peft, dict) or not isinstance(alpha, int | float):
            raise DlmBridgeError(f"{file}: has no peft.alpha, so the adapter's scale is not known")
        if "DoRA" in str(peft.get("_target_", "")):
            raise DlmBridgeError(f"{file}: {peft['_target_']} cannot be converted, only plain LoRA")
        return float(alpha)
    raise DlmBridgeError(f"{path}: has neither a {FILE_NAME} nor a {RUN_CONFIG}, so the adapter's scale is not known")
