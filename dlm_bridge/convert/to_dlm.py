"""Conversion of an autoregressive Hub checkpoint to a diffusion model: same weights, a mask token, a new config."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoints.huggingface import ConvertedCheckpoint, HubCheckpoint, json_bytes, open_hub
from dlm_bridge.convert.planning import ConversionReport
from dlm_bridge.convert.settings import ToDlmSettings, settings_from, takes
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.errors import CheckpointError, SettingError, one_line
from dlm_bridge.files.atomic import temporary_folder
from dlm_bridge.files.reading import read_json
from dlm_bridge.hub import inside
from dlm_bridge.mapping.rules import Vocabulary
from dlm_bridge.models import bailing_moe
from dlm_bridge.models.derived import BODIES, forms_of
from dlm_bridge.models.families import FamilySpec, family_by_name
from dlm_bridge.models.initialisation import Normal, initialise, initializer_range
from dlm_bridge.models.rope import rope_theta_form
from dlm_bridge.models.special_tokens import aligned_ids

# Diffusion families with the same tensor names, by autoregressive family; the first is the default.
TARGETS: dict[str, tuple[str, ...]] = {body.name: tuple(forms_of(body).values()) for body in BODIES}
GENERATION = "generation_config.json"
DEFAULT = "<|mask|>"
IDLM_MASKS = 3  # masks after a token, as measured (docs/adaptation.md); the published config's default is 1
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_WITHOUT_BLOCKS = ("masked", "shifted")  # objectives
_FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


@takes(ToDlmSettings)
def convert_to_dlm(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    mask_token: str | None = None,
    to: str | None = None,
    **settings: Any,
) -> ConversionReport:
    """Convert an autoregressive checkpoint to a diffusion checkpoint, ready for `pretrain`.

    The mask token's rows of the embedding and output layer, and rows that the vocabulary lacks, are randomly
    initialised.

    Args:
        source: Hub folder or Hub id.
        output: Hub folder to write.
        mask_token: text of the mask token; see `ToDlmSettings`.
        to: form of the result; see `ToDlmSettings`.
        settings: the other fields of `ToDlmSettings`.

    Raises:
        SettingError: the source's family has no target, the tokenizer already has another mask token, or the output
            exists.
        CheckpointError: the source is damaged, or has no tokenizer.json.
    """
    chosen = settings_from(ToDlmSettings, mask_token=mask_token, to=to, **settings)
    opened = open_hub(source, chosen)
    target = _target(opened, chosen.to)
    if chosen.block_size is not None and target.objective in _WITHOUT_BLOCKS:
        raise SettingError("block_size", f"{target.name} has {target.attention_pattern} attention, without blocks")
    token = find_mask_token(opened.folder, chosen.mask_token)
    checkpoint = _DiffusionCheckpoint(opened, target, token, chosen.seed, chosen.block_size)
    report = write_hub(checkpoint, Path(output), chosen)
    report.action = "convert-to-dlm"
    rows = checkpoint.dims.vocab - opened.dims.vocab
    attention_pattern = target.attention_pattern.replace("_", "-")
    report.notes += [
        f"{'added the' if token.added else 'the tokenizer has the'} mask token {token.text} (id {token.id}); its "
        "embedding is random until you train",
        f"vocabulary size {checkpoint.dims.vocab}" + (f" ({rows} new)" if rows else ""),
        f"{target.title}: {attention_pattern} attention, "
        + ("shifted: logits[i-1] predicts i" if target.shift else "no shift"),
    ]
    if aligned := aligned_ids(opened.config, token.special):
        taken = ", ".join(f"{name} {value}" for name, value in sorted(aligned.items()))
        report.notes.append(f"config.json is aligned with the tokenizer's special tokens: {taken}")
    report.notes += opened.notes
    if checkpoint.mtp_layers:
        report.notes.append(
            f"omitted {checkpoint.mtp_layers} multi-token prediction layers, which predict next tokens"
        )
    return report


def _target(source: HubCheckpoint, name: str | None) -> FamilySpec:
    family = source.family
    if family.name not in TARGETS:
        what = "a diffusion model already" if family.kind == "diffusion" else "not supported"
        raise SettingError(
            "source", f"{source.where} is {what} ({family.name}): convertible families are {', '.join(TARGETS)}"
        )
    names, forms = TARGETS[family.name], forms_of(family)
    name = forms.get(name or "", name) or names[0]
    if name not in names:
        raise SettingError(
            "to", f"{name}: {family.name} can be converted to {', '.join(forms)} ({' or '.join(names)})"
        )
    return family_by_name(name)


class _DiffusionCheckpoint(ConvertedCheckpoint):
    """Target family's model with the source's tensors and the mask token's rows."""

    def __init__(
        self, source: HubCheckpoint, target: FamilySpec, token: MaskToken, seed: int, block_size: int | None
    ) -> None:
        self._token, self._seed = token, seed
        texts = dict(token.files)
        config = _config(source, target, token)
        if block_size is None and target.is_any_of(("idlm",)) and "block_size" not in config:
            block_size = IDLM_MASKS
        if block_size is not None:
            names = getattr(target.load("config_class"), "attribute_map", {})
            config[names.get("block_size", "block_size")] = block_size
        if GENERATION in source.hub.files:
            values = _generation(source.folder / GENERATION)
            texts[GENERATION] = json_bytes(values | aligned_ids(values, token.special, source.config))
        # Omit stored rotary frequencies (the first Llama checkpoints') and multi-token prediction layers.
        mtp = [name for name in source.reader.names if _layer(name) >= source.dims.layers]
        omitted = {*mtp, *(name for name, entry in source.passthrough.items() if not entry.in_model)}
        self.mtp_layers = len({_layer(name) for name in mtp})
        shards = [
            replace(shard, tensors=tuple(name for name in shard.tensors if name not in omitted))
            for shard in source.hub.shards
        ]
        self._stored = {name: source.spec(name) for name in source.reader.names if name not in omitted}
        super().__init__(source, target, config, texts, (shard for shard in shards if shard.tensors))
        old, new = source.dims.vocab, self.dims.vocab
        vocabulary = {n for param in self.params if isinstance(param.rule, Vocabulary) for n in param.hub_names}
        self._with_mask_row = vocabulary | {n for n, entry in self.passthrough.items() if entry.copy_of in vocabulary}
        for name in self._with_mask_row & self._stored.keys():
            dtype, shape = self._stored[name]
            if shape[0] == old:
                self._stored[name] = (dtype, (new, *shape[1:]))

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.reader.read(name)
        if name not in self._with_mask_row:
            return tensor
        self._note(name, tensor)
        old, (rows, hidden) = tensor.shape[0], self._stored[name][1]
        normal = Normal(initializer_range(self.config))
        entry = self.passthrough.get(name)  # a redundant tied head must remain a copy of the embedding
        key = entry.copy_of if entry is not None else name
        result = torch.cat([tensor, tensor.new_empty(rows - old, hidden)]) if rows > old else tensor
        for row in {self._token.id, *range(old, rows)}:
            result[row] = initialise(f"{key}[{row}]", (hidden,), normal, self._seed).to(tensor.dtype)
        return result


def _layer(name: str) -> int:
    """Layer number of a Hub tensor; -1 outside the layers."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if match is None else int(match[1])


def _config(source: HubCheckpoint, target: FamilySpec, token: MaskToken) -> dict[str, Any]:
    """config.json of the target family from the source's, without references to remote code.

    A published target's own code is for transformers 4, which does not read `rope_parameters`.
    """
    config = {key: value for key, value in source.config.items() if key not in ("auto_map", "_name_or_path")}
    config |= {key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers") if config.get(key)}
    if source.family is bailing_moe.SPEC:  # LLaDA2 has another default
        config.setdefault("routed_scaling_factor", bailing_moe.DEFAULTS["routed_scaling_factor"])
    return {
        **dict.fromkeys(("eos_token_id", "pad_token_id")),  # the target's defaults are for another tokenizer
        **(config if target.derived_from else rope_theta_form(config)),
        **aligned_ids(config, token.special),
        **({} if target.told_from is None else {target.told_from[1]: True}),
        "architectures": [target.stored_architecture],
        "model_type": target.model_type,
        "mask_token_id": token.id,
        "vocab_size": max(source.dims.vocab, token.id + 1),
    }


def _generation(path: Path) -> dict[str, Any]:
    """Token ids of a generation_config.json. Sampling settings are the diffusion family's own."""
    return {key: value for key, value in read_json(path).items() if key.endswith("_token_id")}


@dataclass(frozen=True)
class MaskToken:
    """Mask token of a tokenizer."""

    text: str
    id: int
    added: bool
    special: dict[str, int | None] = field(default_factory=dict)  # ids of the bos, eos and pad tokens, by config key
    files: dict[str, bytes] = field(default_factory=dict)  # the tokenizer files that change, by name


def find_mask_token(folder: Path, text: str | None) -> MaskToken:
    """Find the mask token of a Hub folder's tokenizer, or add one.

    Args:
        text: a special token, which is added if it is new. None: the tokenizer's own mask token, or else `<|mask|>`.

    Raises:
        CheckpointError: tokenizer.json is missing or damaged.
        SettingError: `text` is an ordinary token, or not the tokenizer's own mask token.
    """
    from tokenizers import AddedToken, Tokenizer

    if not (folder / _TOKENIZER).is_file():
        raise CheckpointError(
            folder,
            f"has no {_TOKENIZER}, to which the mask token is added: save the tokenizer with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) first",
        )
    try:
        tokenizer = Tokenizer.from_file(str(inside(folder, _TOKENIZER)))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(folder / _TOKENIZER, f"cannot be read: {one_line(error)}") from None
    config = _read_json(folder, _TOKENIZER_CONFIG)
    own = _token_text(config.get("mask_token"))
    wanted, text = text, own or text or DEFAULT
    if wanted not in (None, text):
        raise SettingError("mask_token", f"{wanted} is not the tokenizer's own mask token, {own}: omit it")
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    number = tokenizer.token_to_id(text)
    if number is not None and text not in special:
        raise SettingError("mask_token", f"{text} is an ordinary token of the vocabulary: name a new or special token")
    added = number is None
    files = {}
    if added:
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        number = tokenizer.token_to_id(text)
        with temporary_folder() as temporary:
            tokenizer.save(str(temporary / _TOKENIZER))
            files[_TOKENIZER] = (temporary / _TOKENIZER).read_bytes()
    assert number is not None
    files |= _other_files(folder, config, text, number)
    named = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
    ids = {f"{name}_id": tokenizer.token_to_id(t) for name, t in named.items() if t is not None and t != text}
    return MaskToken(text, number, added, ids, files)


def _other_files(folder: Path, config: dict[str, Any], text: str, number: int) -> dict[str, bytes]:
    """Changed tokenizer files besides tokenizer.json, among those that the folder has."""
    config = {**config, "mask_token": text}
    if config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5 reads both names, transformers 4 one
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("added_tokens_decoder"), dict):
        known = {str(number): {"content": text, **_FLAGS}}
        config["added_tokens_decoder"] = {**known, **config["added_tokens_decoder"]}
        config["added_tokens_decoder"] = dict(sorted(config["added_tokens_decoder"].items(), key=lambda i: int(i[0])))
    files = {_TOKENIZER_CONFIG: json_bytes(config)}
    if (folder / "special_tokens_map.json").is_file():
        files["special_tokens_map.json"] = json_bytes(
            {**_read_json(folder, "special_tokens_map.json"), "mask_token": text}
        )
    if (folder / "added_tokens.json").is_file():
        files["added_tokens.json"] = json_bytes({**_read_json(folder, "added_tokens.json"), text: number})
    return files


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        return {}
    return read_json(inside(folder, name))


def _token_text(token: Any) -> str | None:
    """Text of a token, which is stored as text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
