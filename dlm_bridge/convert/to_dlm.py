"""Conversion of an autoregressive Hub checkpoint to a diffusion one: mask token, model type, same weights."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint, MadeOfHub, json_bytes, open_hub
from dlm_bridge.convert.planning import ConversionReport
from dlm_bridge.convert.settings import HubSettings
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.convert.workers import Progress
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.files.atomic import temporary_folder
from dlm_bridge.files.reading import read_json
from dlm_bridge.hub import CONFIG_FILE, inside, read_config, resolve
from dlm_bridge.mapping.rules import Vocabulary
from dlm_bridge.models import bailing_moe
from dlm_bridge.models.derived import BODIES, forms_of
from dlm_bridge.models.families import UNSUPPORTED, FamilySpec, families, family_by_name
from dlm_bridge.models.initialisation import Normal, initialise, initializer_range
from dlm_bridge.models.rope import rope_theta_form
from dlm_bridge.models.special_tokens import aligned_ids

# The autoregressive family -> the diffusion families whose tensors have the same names; the first is the default.
TARGETS: dict[str, tuple[str, ...]] = {body.name: tuple(forms_of(body).values()) for body in BODIES}
GENERATION = "generation_config.json"
DEFAULT = "<|mask|>"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def convert_to_dlm(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    mask: str | None = None,
    to: str | None = None,
    *,
    seed: int = 0,
    block_size: int | None = None,
    dequantize_fp8: bool = False,
    dequantize_mxfp4: bool = False,
    revision: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    accept_changed_tensors: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write the diffusion checkpoint that `source` (a Hub folder or id) becomes, ready for `pretrain`.

    Args:
        mask: the mask token's text; see `mask_token`.
        to: the attention pattern and shift, as "bidirectional", "shifted" or "block-causal", or the name of a family
            of `TARGETS`; by default the family's first.
        seed: the mask token's rows of the embedding and of the output layer, and rows that the vocabulary lacks, are
            noise drawn from (seed, tensor name).
        block_size: of a block-causal model; by default the source's or the target family's.
        dequantize_fp8, dequantize_mxfp4: whether block-scaled FP8 weights, or experts in MXFP4, become bfloat16 ones;
            without it they are refused.

    Raises:
        DlmBridgeError: an architecture without a target, a tokenizer that cannot take the token, a source that is not
            whole, a refused output.
    """
    _check_architecture(os.fspath(source), revision)
    opened = open_hub(os.fspath(source), revision, None, dequantize_fp8, dequantize_mxfp4)
    target = _target(opened, to)
    if block_size is not None and target.attention_pattern != "block_causal":
        raise DlmBridgeError(f"--block-size {block_size}: {target.name} is {target.attention_pattern}, without blocks")
    if block_size is not None and block_size < 1:
        raise DlmBridgeError(f"--block-size {block_size}: a block has at least one position")
    token = mask_token(opened.folder, mask)
    checkpoint = _Converted(opened, target, token, seed, block_size)
    settings = HubSettings(
        workers=workers,
        overwrite=overwrite,
        dry_run=dry_run,
        progress=progress,
        accept_changed_tensors=accept_changed_tensors,
    )
    report = write_hub(checkpoint, Path(output), settings)
    report.action = "convert-to-dlm"
    rows = checkpoint.dims.vocab - opened.dims.vocab
    attention_pattern = target.attention_pattern.replace("_", "-")
    report.notes += [
        f"{'added the' if token.added else 'the tokenizer has the'} mask token {token.text} (id {token.id}); its "
        "embedding is random until you train",
        f"vocabulary size {checkpoint.dims.vocab}" + (f", {rows} of them new" if rows else ""),
        f"{target.title}: {attention_pattern} attention, "
        + ("shifted: logits[i-1] predicts i" if target.shift else "no shift"),
    ]
    if aligned := aligned_ids(opened.config, token.special):
        taken = ", ".join(f"{name} {value}" for name, value in sorted(aligned.items()))
        report.notes.append(f"config.json is aligned with the tokenizer's special tokens: {taken}")
    report.notes += opened.notes
    if checkpoint.mtp_layers:
        report.notes.append(
            f"{checkpoint.mtp_layers} multi-token prediction layers are left out: they predict next tokens"
        )
    return report


def _check_architecture(source: str, revision: str | None) -> None:
    """Raise DlmBridgeError for an architecture of no family, with its name and with those that can be converted."""
    path = resolve(source, revision) / CONFIG_FILE
    architectures = read_config(path).get("architectures") if path.is_file() else None
    if not isinstance(architectures, list) or not architectures:
        return  # refused when it is opened
    known = {name for family in families() for name in family.architectures} | UNSUPPORTED.keys()
    if not known & {str(name) for name in architectures}:
        taken = ", ".join(name for body in BODIES for name in body.architectures)
        raise DlmBridgeError(f"{path}: architecture {architectures[0]} cannot be converted: known are {taken}")


def _target(source: HubCheckpoint, name: str | None) -> FamilySpec:
    family = source.family
    if family.kind == "diffusion":
        raise DlmBridgeError(f"{source.where} is a diffusion model already ({family.name})")
    if family.name not in TARGETS:
        raise DlmBridgeError(
            f"{source.where}: no diffusion family has the tensors of {family.name}: known are {', '.join(TARGETS)}"
        )
    names, forms = TARGETS[family.name], forms_of(family)
    name = forms.get(name or "", name) or names[0]
    if name not in names:
        raise DlmBridgeError(f"--to {name}: {family.name} becomes {', '.join(forms)} ({' or '.join(names)})")
    return family_by_name(name)


class _Converted(MadeOfHub):
    """The source's tensors as the target family's, with the mask token's rows."""

    def __init__(
        self, source: HubCheckpoint, target: FamilySpec, token: MaskToken, seed: int, block_size: int | None
    ) -> None:
        self._token, self._seed = token, seed
        texts = dict(token.files)
        config = _config(source, target, token)
        if block_size is not None:
            config["block_size"] = block_size
        if GENERATION in source.hub.files:
            values = _generation(source.folder / GENERATION)
            texts[GENERATION] = json_bytes(values | aligned_ids(values, token.special, source.config))
        # No diffusion model has the rotary frequencies that the first Llama checkpoints store, nor MTP layers.
        self._left = {name for name, entry in source.passthrough.items() if not entry.in_model}
        mtp = [name for name in source.reader.names if _layer(name) >= source.dims.layers]
        self._left |= {*mtp}
        self.mtp_layers = len({_layer(name) for name in mtp})
        shards = [
            replace(shard, tensors=tuple(name for name in shard.tensors if name not in self._left))
            for shard in source.hub.shards
        ]
        self._stored = {name: source.spec(name) for name in source.reader.names if name not in self._left}
        super().__init__(source, target, config, texts, (shard for shard in shards if shard.tensors))
        old, new = source.dims.vocab, self.dims.vocab
        vocabulary = {n for param in self.params if isinstance(param.rule, Vocabulary) for n in param.hub_names}
        self._noisy = vocabulary | {n for n, entry in self.passthrough.items() if entry.copy_of in vocabulary}
        for name in self._noisy & self._stored.keys():
            dtype, shape = self._stored[name]
            if shape[0] == old:
                self._stored[name] = (dtype, (new, *shape[1:]))

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.reader.read(name)
        if name not in self._noisy:
            return tensor
        self._note(name, tensor)
        old, (rows, hidden) = tensor.shape[0], self._stored[name][1]
        noise = Normal(initializer_range(self.config))
        entry = self.passthrough.get(name)  # a redundant tied head must stay the embedding's copy
        key = entry.copy_of if entry is not None else name

        def drawn(row: int) -> torch.Tensor:
            return initialise(f"{key}[{row}]", (hidden,), noise, self._seed).to(tensor.dtype)

        result = torch.cat([tensor, tensor.new_empty(rows - old, hidden)]) if rows > old else tensor
        for row in {self._token.id, *range(old, rows)}:
            result[row] = drawn(row)
        return result


def _layer(name: str) -> int:
    """The number of the layer that a tensor of the Hub belongs to; -1 outside the layers."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if match is None else int(match[1])


def _config(source: HubCheckpoint, target: FamilySpec, token: MaskToken) -> dict[str, Any]:
    """The source's keys under the target's names. Remote code that the source names is not the target's.

    A published target's own code is of transformers 4 and would read nothing of `rope_parameters`.
    """
    config = {key: value for key, value in source.config.items() if key not in ("auto_map", "_name_or_path")}
    config |= {key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers") if config.get(key)}
    if source.family is bailing_moe.SPEC:  # LLaDA2's own default is another
        config.setdefault("routed_scaling_factor", bailing_moe.DEFAULTS["routed_scaling_factor"])
    return {
        **dict.fromkeys(("eos_token_id", "pad_token_id")),  # a target's own default is another tokenizer's
        **(config if target.derived_from else rope_theta_form(config)),
        **aligned_ids(config, token.special),
        "architectures": [target.architectures[0]],
        "model_type": target.model_type,
        "mask_token_id": token.id,
        "vocab_size": max(source.dims.vocab, token.id + 1),
    }


def _generation(path: Path) -> dict[str, Any]:
    """Only the token ids: how to sample is the diffusion family's own."""
    return {key: value for key, value in read_json(path).items() if key.endswith("_token_id")}


@dataclass(frozen=True)
class MaskToken:
    """`files` are the tokenizer files that change, by their names in the folder; `special` are its bos, eos and pad
    tokens by their names in a config."""

    text: str
    id: int
    added: bool
    special: dict[str, int | None] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def mask_token(folder: Path, text: str | None) -> MaskToken:
    """The mask token of a Hub folder's tokenizer: the one that it has, or a special token `text`, which is added
    where it is new. None takes the tokenizer's own mask token, else adds `<|mask|>`.

    Raises DlmBridgeError without a readable tokenizer.json, and where `text` is an ordinary token or another mask
    token than the tokenizer's own.
    """
    from tokenizers import AddedToken, Tokenizer

    if not (folder / _TOKENIZER).is_file():
        raise DlmBridgeError(
            f"{folder} has no {_TOKENIZER}, which takes the mask token: save its tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) first"
        )
    try:
        tokenizer = Tokenizer.from_file(str(inside(folder, _TOKENIZER)))
    except Exception as error:  # tokenizers raises plain Exception
        raise DlmBridgeError(f"{folder / _TOKENIZER}: cannot be read: {one_line(error)}") from None
    config = _read_json(folder, _TOKENIZER_CONFIG)
    own = _token_text(config.get("mask_token"))
    if own is not None and text is not None and own != text:
        raise DlmBridgeError(
            f"{folder}: the tokenizer has the mask token {own} already: leave --mask-token {text} out"
        )
    text = own or text or DEFAULT
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    number = tokenizer.token_to_id(text)
    if number is not None and text not in special:
        raise DlmBridgeError(
            f"--mask-token {text} is an ordinary token of the vocabulary: name a new or a special one"
        )
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
    """What else of a tokenizer names its special tokens, where the folder has it."""
    config = {**config, "mask_token": text}
    if config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name, unknown to 4; it reads both
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
    """A token's text, which is written plainly or with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
