"""DiffusionLM: what every diffusion language model class shares.

Strict loading, the family's attention mask, the diffusion loss, `generate`, exact saving, and the refusal of trainers
that compute a next-token loss.
"""

# mypy: disable-error-code="attr-defined, misc"
# A mixin: `self` has the attributes of the body that it is placed before.

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.dynamic_module_utils import get_relative_imports
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.utils import can_return_tuple, logging
from transformers.utils.hub import cached_file

from dlm_bridge.attention.masks import block_causal_mask, mask_for_implementation, position_ids_from_padding
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.files.atomic import share_weights
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import diffusion_loss, weighted_loss
from dlm_bridge.objectives.registry import family_objective, noise_process

if TYPE_CHECKING:
    from dlm_bridge.generation.config import DiffusionGenerationConfig

logger = logging.get_logger(__name__)

# Packages and modules that may stand between a trainer and the model.
BETWEEN = ("torch", "accelerate", "peft", "deepspeed", "transformers.utils", "dlm_bridge.models")
TRL, TRAINER = "trl", "transformers.trainer"


def register_hub_names(
    model_class: type[PreTrainedModel],
    renames: tuple[tuple[str, str], ...],
    converters: Sequence[WeightConverter] = (),
) -> None:
    """Tell transformers how a class's tensors are named on the Hub, for loading and, reversed, for saving.

    Registered by class name, since families share model types. `renames` are (Hub pattern, name in the body);
    `converters` (such as `expert_converters()`) follow them, so that their Hub names are those after renaming.
    """
    transforms: list[Any] = [
        WeightRenaming(source_patterns=source, target_patterns=target) for source, target in renames
    ]
    register_checkpoint_conversion_mapping(model_class.__name__, [*transforms, *converters], overwrite=True)


class DiffusionLM:
    """Mixin placed before a transformers `...ForCausalLM` body.

    `generate` is of a higher layer (dlm_bridge.generation), which is imported only when it is used.
    """

    family: ClassVar[FamilySpec]
    generation_config: Any

    @property
    def generation_config_class(self) -> type[DiffusionGenerationConfig]:
        """The class that transformers makes `generation_config` of."""
        from dlm_bridge.generation.config import DiffusionGenerationConfig

        return DiffusionGenerationConfig

    @property
    def sampler_defaults(self) -> Mapping[str, Any]:
        """`generate`'s sampler and the defaults that are not its own; the family's, unless a config tells more: that
        the model was trained with random tokens."""
        return self.family.sampler if noise_process(self.config) in (None, "mask") else {"algorithm": "uniform"}

    @property
    def init_continuous_batching(self) -> Any:
        """Not there: transformers' continuous batching predicts next tokens with a cache of pages. Its server asks for
        this method, and takes requests one after another without it."""
        raise AttributeError(
            f"{type(self).__name__} is a diffusion model, which continuous batching cannot sample: call generate"
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but no parameter is ever left at its random initialisation: a missing, unexpected or
        mis-shaped tensor raises DlmBridgeError with its name."""
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["output_loading_info"] = True
        # transformers renders mismatches as a long report; loading past them lets one line name the tensor.
        kwargs["ignore_mismatched_sizes"] = True
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        _assert_all_loaded(info, pretrained_model_name_or_path)
        return (model, info) if wants_info else model

    def post_init(self) -> None:
        """As in transformers. Also makes attention layers non-causal, and lets the embedding's padding row train: in
        most families that token is the end of text."""
        self.get_input_embeddings().padding_idx = None
        if self.family.attention_pattern != "causal":
            for module in self.modules():
                if getattr(module, "is_causal", False):
                    module.is_causal = False
        body = getattr(self, self.base_model_prefix, None)
        if body is not None and not body._forward_pre_hooks:
            check = functools.partial(check_body_call, type(self).__name__)
            body.register_forward_pre_hook(check, with_kwargs=True)
        super().post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        generator: torch.Generator | None = None,
        loss_weights: torch.Tensor | None = None,
        targets: torch.LongTensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """One denoiser pass.

        Args:
            input_ids: [B, S] token ids, some of them the mask token.
            attention_mask: [B, S], zero at padding; or [B, 1, S, S], boolean (True: may attend) or additive.
            position_ids: [B, S], counted from 0 by default.
            labels: with `generator`, [B, S] clean tokens, -100 where a position is never masked: the family's own
                diffusion loss of clean `input_ids` is returned. With `loss_weights`, [B, S] the token that each
                position's logits predict, -100 where a position does not count: `input_ids` hold their masks already
                (`dlm_bridge.train.collator.DiffusionCollator` makes all of it), and the loss is the weighted
                cross-entropy over the number of labels.
            generator: where the noise of clean `input_ids` comes from.
            loss_weights: [B, S] weights of an already noised batch, zero where a label only counts.
            targets: what `labels` would be beside `loss_weights`, for trainers that keep the labels to themselves.
            num_items_in_batch: the divisor in place of the number of labels: transformers' Trainer gives that of all
                micro-batches of a step.
            logits_to_keep: 0 for all positions, n for the last n, a boolean [B, S] mask for logits [n_kept, V] in
                row-major order, or index tensors, as in transformers.
            attention_bias: the original code's name for a 4-D `attention_mask`.

        Raises:
            DlmBridgeError: `labels` without `generator` or `loss_weights`; a trainer that computes a next-token loss
                from the logits; a cache, which a bidirectional model cannot use.
        """
        if past_key_values is not None or cache is not None or use_cache:
            raise DlmBridgeError(f"{type(self).__name__} has no key/value cache: drop cache and use_cache")
        if attention_bias is not None:
            if attention_mask is not None:
                raise DlmBridgeError("pass attention_mask or attention_bias, not both")
            attention_mask = attention_bias
        labels = targets if labels is None else labels
        if labels is not None and loss_weights is None:
            return self._diffusion_loss(input_ids, labels, generator, attention_mask, position_ids, **kwargs)
        if labels is None:
            check_call_without_labels(type(self).__name__, weighted=loss_weights is not None)
        else:
            check_label_smoothing(type(self).__name__)
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise DlmBridgeError("pass input_ids or inputs_embeds")
        mask, positions = self._mask_and_positions(tokens, attention_mask, position_ids)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            **kwargs,
        )
        hidden, kept = outputs.last_hidden_state, logits_to_keep
        if isinstance(kept, torch.Tensor):  # a device map may have put the last layer elsewhere
            kept = kept.to(hidden.device)
        logits = self.lm_head(slice_logits_to_keep(hidden, kept))
        loss = None
        if labels is not None and loss_weights is not None:
            loss = weighted_loss(logits, labels, loss_weights, logits_to_keep, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _mask_and_positions(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The family's attention mask and position ids. A 4-D mask overrides the family's attention pattern.

        Position ids that begin again at 0 mark packed documents, which a block-causal model separates; another one
        warns, since its tokens attend to all of the row.

        For a bidirectional or causal body transformers makes the mask itself, out of `config.is_causal`.
        """
        if attention_mask is not None and attention_mask.dim() not in (2, 4):
            raise DlmBridgeError(f"attention_mask must have 2 or 4 dimensions, not {attention_mask.dim()}")
        own = attention_mask is not None and attention_mask.dim() == 4
        if not own and self.family.attention_pattern == "block_causal":
            if position_ids is None and attention_mask is not None:
                position_ids = position_ids_from_padding(attention_mask)  # blocks start at a row's first real token
            elif position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
            documents = position_ids.eq(0).cumsum(dim=-1)
            attention_mask = block_causal_mask(position_ids, self.config.block_size, attention_mask, documents)
            own = True
        elif not own and position_ids is not None:
            check_packing(type(self).__name__, position_ids, attention_mask)
        if self.family.attention_pattern == "causal" and attention_mask is None and position_ids is not None:
            # Without one transformers takes positions that do not count up for several packed sequences.
            attention_mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if own and attention_mask is not None:
            implementation = self.config._attn_implementation
            attention_mask = mask_for_implementation(attention_mask, implementation, self.dtype)
        return attention_mask, position_ids

    def _diffusion_loss(
        self,
        input_ids: torch.Tensor | None,
        labels: torch.Tensor,
        generator: torch.Generator | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The family's own training loss over clean `input_ids`."""
        if generator is None:
            raise DlmBridgeError(
                f"{needs_noise(type(self).__name__)}. Pass "
                "generator=torch.Generator(device).manual_seed(seed) with labels, or let "
                "dlm_bridge.train.collator.DiffusionCollator make the batches"
            )
        if input_ids is None:
            raise DlmBridgeError("the diffusion loss masks tokens: pass input_ids, not inputs_embeds")

        def logits(**arguments: Any) -> torch.Tensor:
            return self.forward(**arguments).logits

        loss = diffusion_loss(
            logits, family_objective(self), input_ids, labels, generator, attention_mask, position_ids, **kwargs
        )
        return CausalLMOutputWithPast(loss=loss)

    def generate(self, inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Sample with the family's own algorithm; see `dlm_bridge.generation.generate` for every parameter."""
        from dlm_bridge.generation import generate

        return generate(self, inputs, generation_config=generation_config, **kwargs)

    def adjust_generation_fn(
        self, generation_config: Any, from_auto_class: Any, from_pipeline: Any, source: Any, **kwargs: Any
    ) -> None:
        """Called by `from_pretrained`: generation_config.json as our class.

        transformers, reading it as its own, drops a sampler's parameters where the file says `_from_model_config`, and
        would run a custom_generate/generate.py for `trust_remote_code=True`.
        """
        config_class = self.generation_config_class
        kwargs.pop("trust_remote_code", None)
        if generation_config is not None:
            self.generation_config = config_class.from_config(generation_config)
        elif source is not None:
            try:
                self.generation_config = config_class.from_pretrained(source, **kwargs)
            except OSError as error:
                if isinstance(error.__context__, ValueError):  # a file, but not of JSON
                    raise DlmBridgeError(
                        f"{source}: generation_config.json is not readable: {one_line(error)}"
                    ) from error
                # no such file: what old versions of transformers kept in config.json
                self.generation_config = config_class.from_config(self.generation_config)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, under the Hub's tensor names and keys; the files that `auto_map` names come along, as
        data, so that tools that run the original remote code load the result too."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            copy_remote_code(self.config, Path(save_directory))
            share_weights(Path(save_directory))


def attend(
    layer: Any,
    q_BHSD: torch.Tensor,
    k_BHSD: torch.Tensor,
    v_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    eager: Callable[..., Any],
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output [B, S, hidden size] and the weights of an attention layer that makes its heads itself, by the
    attention function that its config names; `eager` is that of the layer's body."""
    function = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager)
    dropout = layer.attention_dropout if layer.training else 0.0
    output_BSHD, weights = function(
        layer, q_BHSD, k_BHSD, v_BHSD, attention_mask, dropout=dropout, scaling=layer.scaling, **kwargs
    )
    return layer.o_proj(output_BSHD.flatten(2).contiguous()), weights


def _assert_all_loaded(info: Any, where: Any) -> None:
    def first(names: Any) -> str:
        names = sorted(str(name[0]) if isinstance(name, tuple) else str(name) for name in names)
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    if mismatched := info["mismatched_keys"]:
        _, found, wanted = sorted(mismatched)[0]
        raise DlmBridgeError(
            f"{where}: {first(mismatched)} has shape {tuple(found)} in the checkpoint, {tuple(wanted)} by the config"
        )
    if info["missing_keys"]:
        raise DlmBridgeError(f"{where}: the checkpoint lacks {first(info['missing_keys'])}")
    if info["unexpected_keys"]:
        raise DlmBridgeError(
            f"{where}: the checkpoint has {first(info['unexpected_keys'])}, which the model does not use"
        )
    if info.get("error_msgs"):
        raise DlmBridgeError(f"{where}: {str(info['error_msgs'][0]).splitlines()[0]}")


def copy_remote_code(config: Any, folder: Path) -> None:
    """Copy the .py files that the config's auto_map names, and those that they import from beside them, from where the
    model was loaded; they are never run."""
    files = sorted(
        {
            reference.split("--")[-1].split(".")[0] + ".py"
            for reference in (getattr(config, "auto_map", None) or {}).values()
            if isinstance(reference, str)
        }
    )
    for file in files:  # which grows
        if (folder / file).exists():
            continue
        try:
            source = cached_file(config.name_or_path, file, local_files_only=True) if config.name_or_path else None
        except OSError:
            source = None
        if source is None:
            logger.warning(f"auto_map names {file}, which is not at {config.name_or_path or 'the source'}: not saved")
        else:
            shutil.copyfile(source, folder / file)
            with contextlib.suppress(UnicodeDecodeError):  # no code, then
                imported = sorted(f"{name.split('.')[0]}.py" for name in get_relative_imports(folder / file))
                files += [name for name in imported if name not in files]


# -- Trainers that take a diffusion model for a causal one and compute a next-token loss from its outputs. That of
# transformers hands labels to the model, which can refuse them. Those of TRL (SFT, DPO, GRPO, KTO, RLOO) call the body
# and score the next token from its hidden states; with label smoothing both compute the loss from the logits. The
# model only sees who calls it.


def needs_noise(name: str) -> str:
    """What a diffusion model without noise answers, whoever asks for its loss."""
    return f"{name} is a diffusion model: its loss needs noise"


def check_body_call(name: str, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model's body: called by the model itself it passes.

    Raises:
        DlmBridgeError: a trainer wants gradients of a next-token loss.
    """
    # Sampling pays for no walk over the stack where TRL, of which the caller could be, is not imported.
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or TRL in sys.modules):
        return
    weighted = "loss_weights" in kwargs
    caller = _caller(own=False)
    if caller is None or _is_of(caller, "dlm_bridge"):
        return
    if torch.is_grad_enabled():
        if weighted or _is_of(caller, TRL):
            raise DlmBridgeError(_refusal(name))
        if body.training:
            logger.warning_once(
                f"{needs_noise(name)}. Its body was called for training without the model itself: a next-token loss "
                "of these hidden states is wrong"
            )
    elif _is_of(caller, TRL) and not weighted:
        logger.warning_once(f"{needs_noise(name)}. A next-token loss or likelihood that TRL computes of it is wrong")


def check_call_without_labels(name: str, weighted: bool) -> None:
    """For a forward pass without labels: whether a trainer has kept them to compute a loss from the logits.

    Args:
        name: of the model's class, for messages.
        weighted: the batch has loss weights.

    Raises:
        DlmBridgeError: it has, and that loss is wrong.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if weighted:
        raise DlmBridgeError(_refusal(name))
    caller = _caller(own=True)
    if caller is None or not (_is_of(caller, TRL) or _is_of(caller, TRAINER)):
        return
    if getattr(caller.f_locals.get("self"), "compute_loss_func", None) is None:
        raise DlmBridgeError(_refusal(name))
    logger.warning_once(f"{needs_noise(name)}. Its batches have none, so compute_loss_func must be a diffusion loss")


def check_label_smoothing(name: str) -> None:
    """For a forward pass with the labels of a noised batch.

    Raises:
        DlmBridgeError: the trainer that calls smooths labels, which the loss of the masks would ignore.
    """
    caller = None if torch.compiler.is_compiling() else _caller(own=True)
    if caller is None or not (_is_of(caller, TRL) or _is_of(caller, TRAINER)):
        return
    arguments = None
    while caller is not None and not hasattr(arguments, "label_smoothing_factor"):  # TRL calls from a wrapper
        arguments, caller = getattr(caller.f_locals.get("self"), "args", None), caller.f_back
    if factor := getattr(arguments, "label_smoothing_factor", 0):
        raise DlmBridgeError(
            f"label_smoothing_factor {factor}: {name} is a diffusion model, whose loss smooths no labels: leave it out"
        )


def check_packing(name: str, position_ids: torch.Tensor, real: torch.Tensor | None) -> None:
    """Warn once of rows whose `position_ids` mark packed documents, of a model that does not separate them."""
    if torch.compiler.is_compiling() or ((caller := _caller(own=True)) is not None and _is_of(caller, "dlm_bridge")):
        return  # which hands over documents with a mask of their own
    starts = position_ids.eq(0) if real is None else position_ids.eq(0) & real.bool()
    if bool((starts.sum(dim=-1) > 1).any()):
        logger.warning_once(
            f"{name}: position_ids that begin again at 0 do not separate packed documents, which attend to each "
            "other: pass a 4-D attention_mask"
        )


def _refusal(name: str) -> str:
    return (
        f"{needs_noise(name)}, and this trainer computes a next-token loss itself. Give it DiffusionCollator(..., "
        "for_trl=True) with compute_loss_func=dlm_bridge.train.collator.trl_loss and no label_smoothing_factor; for "
        "rewards or preferences use `dlm-bridge rl`"
    )


def _caller(own: bool) -> FrameType | None:
    """The innermost frame outside this file and outside what stands between; `own`: and outside the model classes."""
    between = BETWEEN if own else BETWEEN[:-1]
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and any(_is_of(frame, name) for name in between):
        frame = frame.f_back
    return frame


def _is_of(frame: FrameType, name: str) -> bool:
    """Whether a frame runs code of a package or a module."""
    module = frame.f_globals.get("__name__") or ""
    return module == name or module.startswith(f"{name}.")
