"""`DiffusionGenerationConfig`: a sampler's settings, saved with the checkpoint as generation_config.json."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from dlm_bridge.generation.setting_names import check_values, diffusion_fields, merge_names

# Unset in the file, so that transformers' text-generation pipeline does not fill them with its own defaults.
PIPELINE_DEFAULTS = ("max_new_tokens", "do_sample", "temperature")


class DiffusionGenerationConfig(GenerationConfig):
    """The settings of a diffusion sampler. None means unset: the checkpoint's or the family's value is used.

    The parameters depend on the sampler (`algorithm`, by default the family's own). They have the published names:
    `dlm_bridge.generation.SAMPLERS[name].parameters()` lists them with their defaults, and the sampler's docstring
    describes them. `generate` refuses a parameter that the sampler does not have.

    Args:
        algorithm: the published sampler, by its name in `SAMPLERS`.
        gen_length, max_new_tokens: new tokens of every row, two names for one setting.
        block_length, block_size: tokens that are denoised together, two names for one setting; blocks are denoised
            from left to right. By default the model's own block.
        temperature: 0 is greedy; above 0 each token is drawn from softmax(logits / temperature).
        top_k, top_p: only the k most probable tokens, or the most probable up to a total of p, are drawn.
        eos_token_id: one id or several that end a row; an explicit None turns stopping off (stored as an empty list).
        pad_token_id: fills a row behind its end.
        mask_token_id: the token of masks.
        cache: the KV cache, see `dlm_bridge.generation.kv_cache`. By default the exact one, where there is one; for
            fast_dllm_v2 "dual" is its own cache of small blocks (approximate; its `use_block_cache`).
        execution: how forward passes run: "eager", "graph" (CUDA graphs, the default on a GPU) or "compiled" (CUDA
            graphs of compiled decoder layers: faster, after up to a minute once for each model).
        repetition_penalty, suppress_tokens, bad_words_ids, min_new_tokens, min_length, no_repeat_ngram_size: as in
            transformers; see `dlm_bridge.generation.constraints`.
        stop_strings: text that ends a row, with `tokenizer=` at the call.
        num_return_sequences: samples of each prompt, next to each other.
        infill: fill the mask tokens inside the prompts, by the sampler's own rule; there are new tokens behind them
            only where `gen_length` is passed. `steps` then are those of each block. A block-causal model fills a block
            without attending to later ones.
        span_lengths: with `infill`, lengths to try for each span of masks; see `dlm_bridge.generation.api`.
        seed: makes the noise a function of the seed and of each row's own prompt; a list is the rows' own seeds.
        output_history: with `return_dict_in_generate`, the result holds every step.
        **kwargs: the parameters of samplers, and any other field of transformers' GenerationConfig; `generate` refuses
            those that it does not support.

    Raises:
        DlmBridgeError: a value that no sampler accepts, or two names of one setting that differ.
    """

    def __init__(self, **kwargs: Any) -> None:
        stopping_off = "eos_token_id" in kwargs and kwargs["eos_token_id"] is None
        kwargs = merge_names(kwargs)
        for name in diffusion_fields():
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(**kwargs)
        if stopping_off:
            self.eos_token_id = None

    def __setattr__(self, name: str, value: Any) -> None:
        # transformers' constructor assigns None to what is unset; a later None is meant.
        if name == "eos_token_id" and value is None and name in self.__dict__:
            value = []
        super().__setattr__(name, value)

    @property
    def gen_length(self) -> int | None:
        return self.max_new_tokens

    @gen_length.setter
    def gen_length(self, value: int | None) -> None:
        self.max_new_tokens = value

    @classmethod
    def from_config(cls, config: GenerationConfig) -> DiffusionGenerationConfig:
        """The same settings as `config`, which may be transformers' own class (that is what it loads from a file)."""
        if isinstance(config, cls):
            return config
        converted = cls.from_dict(config.to_dict())
        if getattr(config, "_original_object_hash", None) is not None:
            converted._original_object_hash = hash(converted)  # as loaded: transformers then saves it leniently
        return converted

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; a null in a file means unset, and a keyword wins by either of a setting's two names."""
        stored = merge_names({key: value for key, value in config_dict.items() if value is not None})
        return super().from_dict(stored, **merge_names(kwargs))

    @classmethod
    def from_model_config(cls, model_config: Any) -> DiffusionGenerationConfig:
        """As in transformers: the generation settings that an old config.json holds, if any."""
        return cls.from_config(GenerationConfig.from_model_config(model_config))

    def to_dict(self) -> dict[str, Any]:
        """Every field but our own unset ones, which plain transformers would not know."""
        own, values = diffusion_fields(), super().to_dict()
        unset = [name for name in own if values.get(name) is None]
        for name in unset:
            values.pop(name, None)
        if len(unset) < len(own):
            # With this mark transformers drops every field that is not its own when it loads the file.
            values.pop("_from_model_config", None)
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """As in transformers, with None for what the sampler has a default of its own: transformers' pipelines fill
        settings that are missing here with values for autoregressive models."""
        return {**dict.fromkeys(PIPELINE_DEFAULTS), **super().to_diff_dict()}

    def to_json_string(
        self, use_diff: bool = True, ignore_metadata: bool = False, keys_to_pop: list[str] | None = None
    ) -> str:
        """As in transformers: unset values are left out."""
        unset = [name for name in PIPELINE_DEFAULTS if use_diff and getattr(self, name) is None]
        return super().to_json_string(use_diff, ignore_metadata, [*(keys_to_pop or []), *unset])

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """As in transformers, with our own checks; a temperature needs no `do_sample` here."""
        check_values(vars(self))
        if user_set_attributes is None:
            user_set_attributes = {name for name, value in vars(self).items() if value is not None}
        # transformers warns about these unless do_sample, and not they, were set by the user.
        own = {"temperature", "top_k", "top_p"}
        super().validate(strict=strict, user_set_attributes=(user_set_attributes | {"do_sample"}) - own)
