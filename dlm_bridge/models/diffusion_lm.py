"""DiffusionLM: base of the diffusion language model classes.

Strict loading, the family's attention mask, the diffusion loss, `generate`, exact saving, and the refusal of trainers
that compute a next-token loss.
"""

# mypy: disable-error-code="attr-defined, misc"
# The mixin's `self` has the attributes of the body that follows it in the bases.

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
from dlm_bridge.errors import CheckpointError, SettingError, first_of, one_line
from dlm_bridge.files.atomic import share_weights
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import diffusion_loss, weighted_loss
from dlm_bridge.objectives.registry import family_objective, noise_process

if TYPE_CHECKING:
    from dlm_bridge.generation.config import DiffusionGenerationConfig

logger = logging.get_logger(__name__)

# Packages and modules whose frames may lie between a trainer's and the model's.
BETWEEN = ("torch", "accelerate", "peft", "deepspeed", "transformers.utils", "dlm_bridge.models")
TRL, TRAINER = "trl", "transformers.trainer"


def register_hub_names(
    model_class: type[PreTrainedModel],
    renames: tuple[tuple[str, str], ...],
    converters: Sequence[WeightConverter] = (),
) -> None:
    """Register the Hub names of a class's tensors with transformers, for loading and, reversed, for saving.

    Args:
        model_class: is registered by its name, since families share model types.
        renames: (regular expression of the Hub name, name in the body).
        converters: applied after `renames`, such as `expert_converters()`.
    """
    transforms: list[Any] = [
        WeightRenaming(source_patterns=source, target_patterns=target) for source, target in renames
    ]
    register_checkpoint_conversion_mapping(model_class.__name__, [*transforms, *converters], overwrite=True)


class DiffusionLM:
    """Mixin placed before a `...ForCausalLM` body of transformers.

    `generate` belongs to a higher layer (dlm_bridge.generation), which is imported on first use.
    """

    family: ClassVar[FamilySpec]
    generation_config: Any

    @property
    def generation_config_class(self) -> type[DiffusionGenerationConfig]:
        """Class of `generation_config`."""
        from dlm_bridge.generation.config import DiffusionGenerationConfig

        return DiffusionGenerationConfig

    @property
    def sampler_defaults(self) -> Mapping[str, Any]:
        """Sampler of `generate` and settings that differ from the sampler's defaults. The family's, except for a model
        whose config says that it was trained with uniform noise."""
        return self.family.sampler if noise_process(self.config) in (None, "mask") else {"algorithm": "uniform"}

    @property
    def init_continuous_batching(self) -> Any:
        """Missing: continuous batching of transformers predicts next tokens with a paged cache. Without this attribute
        transformers' server handles one request at a time."""
        raise AttributeError(
            f"{type(self).__name__} is a diffusion model, which continuous batching cannot sample: call generate"
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint like transformers, but never leave a parameter at its random initialisation: raises
        CheckpointError for a missing, unexpected or mis-shaped tensor."""
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["output_loading_info"] = True
        # transformers prints a long report of mismatches; `_check_all_loaded` names the first tensor instead.
        kwargs["ignore_mismatched_sizes"] = True
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        _check_all_loaded(info, pretrained_model_name_or_path)
        return (model, info) if wants_info else model

    def post_init(self) -> None:
        """Extends transformers' method: makes attention layers non-causal, and trains the embedding of the padding
        token, which in most families is the end of text."""
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
            input_ids: [B, S] token ids, including mask tokens.
            attention_mask: [B, S], zero at padding; or [B, 1, S, S], boolean (True: may attend) or additive.
            position_ids: [B, S]; default: counted from 0.
            labels: with `generator`, [B, S] clean tokens, -100 at positions that are never masked; the output's loss
                is the family's diffusion loss of clean `input_ids`. With `loss_weights`, [B, S] the token that each
                position's logits predict, -100 at positions without a loss; `input_ids` are already masked (see
                `dlm_bridge.train.collator.DiffusionCollator`), and the loss is the weighted cross-entropy divided by
                the number of labels.
            generator: source of the noise for clean `input_ids`.
            loss_weights: [B, S] weights of an already masked batch; a label of weight zero counts in the divisor.
            targets: `labels` beside `loss_weights`, for trainers that do not pass `labels` on.
            num_items_in_batch: divisor of the loss instead of the number of labels; transformers' Trainer passes the
                number in all micro-batches of a step.
            logits_to_keep: 0 for all positions, n for the last n, a boolean [B, S] mask for logits [n_kept, V] in
                row-major order, or index tensors, as in transformers.
            attention_bias: the original code's name of a 4-D `attention_mask`.

        Raises:
            SettingError: `labels` without `generator` or `loss_weights`; a trainer that computes a next-token loss
                from the logits; a cache, which a bidirectional model cannot use.
        """
        if past_key_values is not None or cache is not None or use_cache:
            raise SettingError("use_cache", f"{type(self).__name__} cannot use a KV cache: leave it out")
        if attention_bias is not None:
            if attention_mask is not None:
                raise SettingError("attention_bias", "is another name of `attention_mask`: pass one of them")
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
            raise SettingError("input_ids", "is missing: pass it, or `inputs_embeds`")
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
        if isinstance(kept, torch.Tensor):  # a device map may place the last layer on another device
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

        Position ids that restart at 0 mark packed documents. A block-causal model separates them; other models warn,
        because their tokens attend to the whole row.

        transformers makes the mask of a bidirectional or causal body from `config.is_causal`.
        """
        if attention_mask is not None and attention_mask.dim() not in (2, 4):
            raise SettingError("attention_mask", f"must have 2 or 4 dimensions, not {attention_mask.dim()}")
        own = attention_mask is not None and attention_mask.dim() == 4
        if not own and self.family.attention_pattern == "block_causal":
            if position_ids is None and attention_mask is not None:
                position_ids = position_ids_from_padding(attention_mask)  # blocks start after the padding
            elif position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
            documents = position_ids.eq(0).cumsum(dim=-1)
            attention_mask = block_causal_mask(position_ids, self.config.block_size, attention_mask, documents)
            own = True
        elif not own and position_ids is not None:
            check_packing(type(self).__name__, position_ids, attention_mask)
        if self.family.attention_pattern == "causal" and attention_mask is None and position_ids is not None:
            # Without a mask transformers interprets positions that do not increase by one as packed sequences.
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
        """The family's training loss over clean `input_ids`."""
        if generator is None:
            raise SettingError(
                "generator",
                f"{needs_noise(type(self).__name__)}: pass torch.Generator(device).manual_seed(seed) with `labels`, "
                "or use dlm_bridge.train.collator.DiffusionCollator for the batches",
            )
        if input_ids is None:
            raise SettingError("input_ids", "is missing: the diffusion loss masks tokens, not `inputs_embeds`")

        def logits(**arguments: Any) -> torch.Tensor:
            return self.forward(**arguments).logits

        loss = diffusion_loss(
            logits, family_objective(self), input_ids, labels, generator, attention_mask, position_ids, **kwargs
        )
        return CausalLMOutputWithPast(loss=loss)

    def generate(self, inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Sample with the family's algorithm; see `dlm_bridge.generation.generate` for the parameters."""
        from dlm_bridge.generation import generate

        return generate(self, inputs, generation_config=generation_config, **kwargs)

    def adjust_generation_fn(
        self, generation_config: Any, from_auto_class: Any, from_pipeline: Any, source: Any, **kwargs: Any
    ) -> None:
        """Load generation_config.json as `generation_config_class`; called by `from_pretrained`.

        transformers' own method drops a sampler's parameters if the file has `_from_model_config`, and would run a
        custom_generate/generate.py with `trust_remote_code=True`.
        """
        config_class = self.generation_config_class
        kwargs.pop("trust_remote_code", None)
        if generation_config is not None:
            self.generation_config = config_class.from_config(generation_config)
        elif source is not None:
            try:
                self.generation_config = config_class.from_pretrained(source, **kwargs)
            except OSError as error:
                if isinstance(error.__context__, ValueError):  # the file exists, but is not JSON
                    raise CheckpointError(
                        f"{source}/generation_config.json", f"is not readable: {one_line(error)}"
                    ) from error
                # no such file: old versions of transformers stored the parameters in config.json
                self.generation_config = config_class.from_config(self.generation_config)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save like transformers, under the Hub's tensor names and config keys, with copies of the files that
        `auto_map` names, so that tools that run the original remote code can load the result."""
        from dlm_bridge.generation.config import published_generation_config

        stored = self.generation_config
        self.generation_config = published_generation_config(self)
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.generation_config = stored
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
    """Apply the attention function that the config names, and the output projection, to the heads of `layer`.

    Args:
        eager: the eager attention function of the layer's body.

    Returns:
        The output [B, S, hidden size] and the attention weights, if the function returns them.
    """
    function = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager)
    dropout = layer.attention_dropout if layer.training else 0.0
    output_BSHD, weights = function(
        layer, q_BHSD, k_BHSD, v_BHSD, attention_mask, dropout=dropout, scaling=layer.scaling, **kwargs
    )
    return layer.o_proj(output_BSHD.flatten(2).contiguous()), weights


def _check_all_loaded(info: Any, where: Any) -> None:
    if mismatched := sorted(info["mismatched_keys"]):
        _, found, wanted = mismatched[0]
        name = first_of(name for name, _, _ in mismatched)
        raise CheckpointError(where, f"{name} has shape {tuple(found)}, the config needs {tuple(wanted)}")
    if info["missing_keys"]:
        raise CheckpointError(where, f"the checkpoint lacks {first_of(info['missing_keys'])}")
    if info["unexpected_keys"]:
        raise CheckpointError(
            where, f"the checkpoint has {first_of(info['unexpected_keys'])}, which the model does not use"
        )
    if info.get("error_msgs"):
        raise CheckpointError(where, str(info["error_msgs"][0]).splitlines()[0])


def copy_remote_code(config: Any, folder: Path) -> None:
    """Copy the .py files that the config's auto_map names, and the files that they import relatively, from where the
    model was loaded. They are not run."""
    files = sorted(
        {
            reference.split("--")[-1].split(".")[0] + ".py"
            for reference in (getattr(config, "auto_map", None) or {}).values()
            if isinstance(reference, str)
        }
    )
    for file in files:  # grows during the loop
        if (folder / file).exists():
            continue
        try:
            source = cached_file(config.name_or_path, file, local_files_only=True) if config.name_or_path else None
        except OSError:
            source = None
        if source is None:
            logger.warning(f"{config.name_or_path or 'the source'} lacks {file}, which auto_map names: not saved")
        else:
            shutil.copyfile(source, folder / file)
            with contextlib.suppress(UnicodeDecodeError):  # not Python code
                imported = sorted(f"{name.split('.')[0]}.py" for name in get_relative_imports(folder / file))
                files += [name for name in imported if name not in files]


# -- Trainers for causal models compute a next-token loss from a model's outputs, which is wrong for a diffusion model.
# transformers' Trainer passes labels to the model, which can refuse them. TRL's trainers (SFT, DPO, GRPO, KTO, RLOO)
# call the body and score the next token from its hidden states; with label smoothing both compute the loss from the
# logits. Only the call stack shows who calls.


def needs_noise(name: str) -> str:
    """Message for a loss without noise."""
    return f"{name} is a diffusion model, whose loss needs noise"


def check_body_call(name: str, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model's body. Calls by the model itself pass.

    Raises:
        SettingError: a trainer needs gradients of a next-token loss.
    """
    # When sampling, walk over the stack only if TRL is imported and so can be the caller.
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or TRL in sys.modules):
        return
    weighted = "loss_weights" in kwargs
    caller = _caller(own=False)
    if caller is None or _is_of(caller, "dlm_bridge"):
        return
    if torch.is_grad_enabled():
        if weighted or _is_of(caller, TRL):
            raise _next_token_loss(name)
        if body.training:
            logger.warning_once(
                f"{needs_noise(name)}. Its body was called for training without the model: a next-token loss of these "
                "hidden states is wrong"
            )
    elif _is_of(caller, TRL) and not weighted:
        logger.warning_once(f"{needs_noise(name)}. A next-token loss or likelihood that TRL computes is wrong")


def check_call_without_labels(name: str, weighted: bool) -> None:
    """Check that the caller of a forward pass without labels does not compute a next-token loss from the logits.

    Args:
        name: name of the model's class, for messages.
        weighted: the batch has loss weights.

    Raises:
        SettingError: a trainer of transformers or TRL calls without `compute_loss_func`, or with loss weights.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if weighted:
        raise _next_token_loss(name)
    caller = _caller(own=True)
    if caller is None or not (_is_of(caller, TRL) or _is_of(caller, TRAINER)):
        return
    if getattr(caller.f_locals.get("self"), "compute_loss_func", None) is None:
        raise _next_token_loss(name)
    logger.warning_once(f"{needs_noise(name)}. The batches have none, so compute_loss_func must be a diffusion loss")


def check_label_smoothing(name: str) -> None:
    """Check that the caller of a forward pass with the labels of a masked batch does not smooth labels.

    Raises:
        SettingError: the calling trainer has a label smoothing factor, which the diffusion loss would ignore.
    """
    caller = None if torch.compiler.is_compiling() else _caller(own=True)
    if caller is None or not (_is_of(caller, TRL) or _is_of(caller, TRAINER)):
        return
    arguments = None
    while caller is not None and not hasattr(arguments, "label_smoothing_factor"):  # TRL calls from a wrapper
        arguments, caller = getattr(caller.f_locals.get("self"), "args", None), caller.f_back
    if factor := getattr(arguments, "label_smoothing_factor", 0):
        raise SettingError(
            "label_smoothing_factor", f"{factor} has no effect on the loss of {name}, a diffusion model: leave it out"
        )


def check_packing(name: str, position_ids: torch.Tensor, real: torch.Tensor | None) -> None:
    """Warn once about `position_ids` that mark packed documents, in a model that does not separate them."""
    if torch.compiler.is_compiling() or ((caller := _caller(own=True)) is not None and _is_of(caller, "dlm_bridge")):
        return  # this package passes a mask for packed documents
    starts = position_ids.eq(0) if real is None else position_ids.eq(0) & real.bool()
    if bool((starts.sum(dim=-1) > 1).any()):
        logger.warning_once(
            f"{name}: position_ids that restart at 0 do not separate packed documents, which attend to each other: "
            "pass a 4-D attention_mask"
        )


def _next_token_loss(name: str) -> SettingError:
    return SettingError(
        "compute_loss_func",
        f"{needs_noise(name)}, and this trainer computes a next-token loss: give it DiffusionCollator(..., "
        "for_trl=True) with compute_loss_func=dlm_bridge.train.collator.trl_loss and no label_smoothing_factor; for "
        "rewards or preferences use dlm-bridge rl",
    )


def _caller(own: bool) -> FrameType | None:
    """Innermost frame outside this file and the modules in BETWEEN; `own`: also outside the model classes."""
    between = BETWEEN if own else BETWEEN[:-1]
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and any(_is_of(frame, name) for name in between):
        frame = frame.f_back
    return frame


def _is_of(frame: FrameType, name: str) -> bool:
    """True if a frame runs code of the package or module `name`."""
    module = frame.f_globals.get("__name__") or ""
    return module == name or module.startswith(f"{name}.")
