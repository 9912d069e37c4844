"""Setup of a run before its first step, for every engine: output folder, model, objective, data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, cast

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge import distributed, job
from dlm_bridge.convert.checkpoint import checked_dims
from dlm_bridge.convert.manifest import read_model_config
from dlm_bridge.data.blocks import Blocks, Samples, split
from dlm_bridge.data.chat_template import set_chat_template
from dlm_bridge.data.conversations import (
    ConversationSettings,
    EosPadding,
    load_conversation_blocks,
    longest_conversation,
)
from dlm_bridge.data.documents import Source, check_tokenizer
from dlm_bridge.data.indexed import TokenLimits
from dlm_bridge.data.messages import check_sources
from dlm_bridge.data.sources import DataSources, Part, ReaderSettings, Shares, find_run_data
from dlm_bridge.distributed import from_all, raised_everywhere
from dlm_bridge.errors import DlmBridgeError, SettingError, WorkerError, one_line, printable
from dlm_bridge.files.atomic import atomic_file
from dlm_bridge.generation.gemma import image_token_ids
from dlm_bridge.loading.pretrained import load_tokenizer as open_tokenizer
from dlm_bridge.loading.pretrained import model_family
from dlm_bridge.loading.source import MegatronSource, ModelSource, StartingModel
from dlm_bridge.mapping.rules import Dims
from dlm_bridge.models.families import FamilySpec, find_family
from dlm_bridge.models.special_tokens import align_special_tokens
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.losses import Certainty
from dlm_bridge.objectives.registry import (
    build_objective,
    check_objective,
    find_objective,
    noise_process,
    noise_token_id,
    own_objective,
)
from dlm_bridge.settings import options_of
from dlm_bridge.terminal import loading
from dlm_bridge.train import hang
from dlm_bridge.train.checkpoints import (
    STATE,
    ResumePoint,
    find_resume_point,
    named_checkpoints,
    remove_old_checkpoints,
)
from dlm_bridge.train.config import TrainConfig, refuse
from dlm_bridge.train.config.files import Config, read_run_config
from dlm_bridge.train.monitoring import check_trackers, read_prompts
from dlm_bridge.train.output import HANG, RunEnd, opened_output, write_status
from dlm_bridge.train.publish import check_push, publish
from dlm_bridge.train.ranks import watched
from dlm_bridge.train.schedule import check_adaptation, learning_rate_jump, scheduled_block_size

Rest = ParamSpec("Rest")
BLOCK_LENGTH = 1024  # tokens per block of text, unless `seq_length` says otherwise
NODE_LOCAL = ("data_cache", "local_folder")  # settings that may differ between nodes


@dataclass(frozen=True)
class RunStart:
    """Starting point of a run.

    Args:
        step: last completed step, 0 for a new run.
        checkpoint: checkpoint of that step, None for a new run.
        finished: end of the run if that step was its last one, else None.
    """

    output: Path
    step: int
    checkpoint: Path | None
    finished: RunEnd | None


def start_run(
    config: Config,
    resume: bool,
    main: bool,
    console: Console,
    find: Callable[[TrainConfig, bool, Console], ResumePoint],
) -> tuple[Config, RunStart]:
    """Clean the output folder, and `find` the checkpoint from which the run resumes. Collective. Returns the
    configuration, in which a resumed run has the number of steps that it began with instead of `epochs` or `tokens`,
    and its sequence length.

    Raises:
        SettingError: the model is not the run's, or nothing decides the number of steps.
        CheckpointError: the run has checkpoints, and none is complete.
    """
    output = Path(config.checkpoint.output)
    with raised_everywhere():
        if main:
            remove_old_checkpoints(output)
    point = find(config, main, console) if resume else ResumePoint()
    before = from_all(_run_config(config, output))[0] if resume else None  # a rank may see an older file
    if before is not None:
        kept = {} if config.schedule.steps is not None else {"steps": before.schedule.steps}
        kept |= {} if config.data.seq_length else {"seq_length": before.data.seq_length}
        config = config.replace(**kept)
    config.check_length()
    steps = config.schedule.steps
    finished = None
    if steps is not None and point.step >= steps and point.folder is not None:
        finished = RunEnd(point.folder, point.step)
    if finished is not None and steps is not None and main:
        console.print(printable(f"the run is finished: step {point.step} of {steps}, {point.folder}"), soft_wrap=True)
        write_status(output, "finished", point.step, steps)
    elif before and point.folder is not None and main and (jump := learning_rate_jump(before, config, point.step)):
        console.print(printable(jump), markup=False, highlight=False, soft_wrap=True)
    return config, RunStart(output, point.step, point.folder, finished)


def _run_config(config: Config, output: Path) -> Config | None:
    """Configuration of the run in a folder; None if config.yaml is missing or from another version."""
    try:
        return type(config).from_flags(**read_run_config(output / "config.yaml", type(config)))
    except DlmBridgeError:
        return None


def find_checkpoint(config: TrainConfig) -> ResumePoint:
    """Find the Hub-layout checkpoint from which a run resumes. Collective. Raises CheckpointError, and SettingError if
    it belongs to another model than `model`."""
    point = find_resume_point(named_checkpoints(Path(config.checkpoint.output) / "checkpoints"), STATE)
    if point.folder is not None:
        check_same_model(config, point.folder)
    return point


def resume_point(config: TrainConfig, main: bool, console: Console) -> ResumePoint:
    """Find the checkpoint as `find_checkpoint` does, and set later, damaged ones aside. Collective."""
    point = find_checkpoint(config)
    with raised_everywhere():
        if main:
            for line in point.notes:
                console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
            point.set_aside()
    return point


def with_precision(config: Config, resume: bool = False, gpu: bool | None = None) -> Config:
    """Replace the precision auto: by that of a resumed run, else by bf16 on a GPU that has it, else by fp32.

    Args:
        gpu: True for a plan of GPUs that this machine need not have; None: this machine's devices.
    """
    if config.precision.precision != "auto":
        return config
    before = _run_config(config, Path(config.checkpoint.output)) if resume else None
    if before is not None:
        return config.replace(precision=before.precision.precision)
    if gpu is None:
        gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.replace(precision="bf16" if gpu else "fp32")


def trains_on_cpu(config: TrainConfig) -> bool:
    """True if this machine trains on its CPU. Raises SettingError for a precision that needs a GPU."""
    cpu = not torch.accelerator.is_available()
    if cpu and config.precision.precision == "fp16":
        raise SettingError("precision", "fp16 needs a GPU: use bf16 or fp32 on a CPU")
    return cpu


def training_errors(
    train: Callable[Concatenate[Config, bool, Rest], RunEnd],
) -> Callable[Concatenate[Config, bool, Rest], RunEnd]:
    """Decorator of functions that train a configuration, resumed or not. The processes of the job meet, and share the
    output folder. They watch each other (`ranks.Watchdog`): a lost one is a WorkerError, and an error of one rank ends
    all. A finished run is uploaded to `push_to_hub`; see `publish`."""

    @functools.wraps(train)
    def run(config: Config, resume: bool = False, *arguments: Rest.args, **options: Rest.kwargs) -> RunEnd:
        config = with_precision(config, resume)
        output, timeout_min = Path(config.checkpoint.output), config.parallel.rank_timeout
        defaults = {name: option.default for name, option in options_of(type(config)).items()}
        given = {name: value for name, value in config.as_flags().items() if name not in NODE_LOCAL}
        changed = {name: value for name, value in given.items() if value != defaults.get(name)}
        job.join(60 * timeout_min or job.JOIN_TIMEOUT_S, changed | {"resume": resume})
        with watched(timeout_min, output / HANG), opened_output(output, resume), _named_losses():
            hang.enable_flight_recorder(output / HANG)
            check_push(config)
            end = train(config, resume, *arguments, **options)
        publish(config, end)  # the other processes need not wait
        return end

    return run


@contextlib.contextmanager
def _named_losses() -> Iterator[None]:
    """Context manager that raises the error of a collective operation without an answer as WorkerError."""
    try:
        yield
    except RuntimeError as error:
        if not lost_process(error):
            raise
        reason = textwrap.shorten(one_line(error).split(". ")[0], 300, placeholder=" ...")
        raise WorkerError(
            job.named_rank(distributed.rank()),
            f"another process of the run ended or does not answer ({reason}): the launcher names a killed one; start "
            "again with `resume`",
        ) from error


def lost_process(error: RuntimeError) -> bool:
    """True if a collective operation failed because of another process, or timed out."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def check_same_model(config: TrainConfig, saved: Path) -> None:
    """Raise SettingError if `model` has another family or other sizes than the run's `saved` checkpoint. A model that
    no longer exists, or is on the Hub, is not compared."""
    if not Path(config.model.model).is_dir():
        return
    try:
        asked, own = (_family_and_dims(place, config.model.family) for place in (config.model.model, saved))
    except DlmBridgeError:  # an adapter's checkpoint has no config of the model
        return
    if asked != own:
        raise SettingError(
            "model",
            f"{config.model.model} differs from the model of the run in {config.checkpoint.output}: resume with that, "
            "or use another `output`",
        )


def _family_and_dims(path: str | Path, family: str | None) -> tuple[str, Dims]:
    hub_config, named = read_model_config(path)
    spec = find_family(hub_config, family or named, str(path))
    return spec.name, dataclasses.replace(checked_dims(spec.mapping, hub_config, str(path)), mtp=0)


def model_source(config: TrainConfig, checkpoint: Path | None = None) -> ModelSource:
    """Source of the weights: `model`, or on a resume of a run without an adapter the run's own `checkpoint`. They are
    fp32, except for the frozen base of an adapter, which has the run's precision or is quantized."""
    model = config.model
    resumes = checkpoint is not None and not model.adapts
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(config.precision.precision, torch.bfloat16)
    return ModelSource(
        str(checkpoint) if resumes else model.model,
        model.family,
        config.data.seed if model.from_scratch and not resumes else None,
        model.mask_token_id,
        dtype if model.adapts else torch.float32,
        model.lora_quantize,
    )


def starting_model(config: TrainConfig, checkpoint: Path | None, main: bool) -> StartingModel:
    """Load the model of `model_source`. Under FSDP no process loads all weights, if the checkpoint's format allows
    that."""
    source = model_source(config, checkpoint)
    with loading(config.model.model):
        return source.in_parts(main) if config.parallel.shards else StartingModel(source.load())


def open_megatron_source(config: TrainConfig, checkpoint: Path | None) -> MegatronSource:
    """Open the source of a Megatron model: `model`, or on a resume of a run without an adapter its `checkpoint`."""
    return model_source(config).megatron(None if config.model.adapts else checkpoint)


def empty_model(config: TrainConfig, checkpoint: Path | None) -> Any:
    """Construct the Hub model of a run without weights. Checks names and shapes of a local checkpoint's tensors."""
    checkpoint = None if config.model.adapts else checkpoint
    if config.engine.engine == "megatron" and Path(config.model.model).is_dir():
        return open_megatron_source(config, checkpoint).model
    return model_source(config, checkpoint).empty()


def load_tokenizer(config: TrainConfig) -> Any:
    """Load the tokenizer of `tokenizer`, by default the model's, and set `chat_template`. Raises CheckpointError."""
    if config.model.tokenizer:
        tokenizer = open_tokenizer(config.model.tokenizer, config.model.tokenizer)
    else:
        tokenizer = open_tokenizer(config.model.model, config.model.model, ": set `tokenizer`")
    if config.model.chat_template is not None:
        set_chat_template(tokenizer, config.model.chat_template)
    return tokenizer


def write_config(config: TrainConfig, output: Path) -> None:
    """Write the resolved configuration to config.yaml in the output folder."""
    with atomic_file(output / "config.yaml", overwrite=True) as file:
        file.write(config.to_yaml())


def with_objective(config: Config, model: Any) -> Config:
    """Resolve the objective, and with `sft` the family's fine-tuning defaults.

    Raises:
        SettingError: the objective does not fit the model's attention pattern and shift (training a shifted or
            block-causal model as a bidirectional one would break it silently), or another option does not fit the
            model.
    """
    family = model_family(model)
    if family is None:
        raise SettingError(
            "model",
            f"{config.model.model}: {type(model).__name__} is not in a known family: dlm-bridge families lists what "
            f"{config.task} supports",
        )
    objective = config.objective.objective or own_objective(model.config, family)
    check_objective(objective, family)
    check_length(config, model)
    config = config.replace(objective=objective)
    if config.task == "sft":
        config = with_family_defaults(config, family)
    check_adaptation(config, family)
    check_trackers(config)
    read_prompts(config.logging.sample_prompt)
    return config


def with_family_defaults(config: Config, family: FamilySpec) -> Config:
    """Fill in the family's fine-tuning defaults. The objective is resolved already. Raises SettingError for padding
    that the objective or packing excludes."""
    kind = find_objective(str(config.objective.objective)).kind
    blocks = kind.streams == 2
    chosen = config.data.eos_padding
    refuse(
        (chosen == "block" and not blocks, "eos_padding",
         f"block: objective '{config.objective.objective}' has no blocks: use none or row"),
        (chosen == "row" and config.data.packing, "eos_padding",
         "row excludes `packing`: it fills a row with one answer: use none"),
    )  # fmt: skip
    padding = chosen or family.sft.get("eos_padding", "none")
    if chosen is None and padding == "row" and config.data.packing:
        padding = "block" if blocks else "none"
    normalisation = config.objective.loss_normalisation or family.sft.get("loss_normalisation")
    if config.objective.loss_normalisation is None and normalisation not in kind.normalisations:
        normalisation = None
    on_prompt = config.data.train_on_prompt
    return config.replace(
        eos_padding=padding if blocks or padding != "block" else "none",
        loss_normalisation=normalisation,
        train_on_prompt=family.sft.get("train_on_prompt", False) if on_prompt is None else on_prompt,
    )


def check_length(config: TrainConfig, model: Any) -> None:
    """Raise SettingError for rows that are longer than the model supports."""
    limit = context_length(model)
    if limit is not None and config.data.seq_length > limit:
        raise SettingError("seq_length", f"{config.data.seq_length} is more than the model's {limit} positions")


def context_length(model: Any) -> int | None:
    """Number of positions of a model, None if its config does not limit them."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def with_seq_length(config: Config, model: Any, mask_token: int | None, found: DataSources | None = None) -> Config:
    """Replace a sequence length of 0: for `sft` by that of the longest conversation (with `packing` at least
    `BLOCK_LENGTH`), for `pretrain`, which cuts text into blocks, by `BLOCK_LENGTH`; at most the model's context. It is
    rounded up to what blocks and layout divide. The conversations are tokenised once and cached.

    Args:
        config: from `resolve_objective`.
        mask_token: None if the objective masks nothing.
        found: the data; by default those of `config`.

    Raises the errors of `load_data`.
    """
    if config.data.seq_length:
        return config
    limit = context_length(model) or sys.maxsize
    needed = min(limit, BLOCK_LENGTH)
    if config.task == "sft":
        found = found or find_run_data(*config.data.paths())
        tokenizer, settings = conversation_settings(config, model, mask_token)
        settings = dataclasses.replace(settings, seq_length=limit)
        longest = max(
            longest_conversation(cast(Sequence[Source], part), tokenizer, settings) for part in found.all_parts
        )
        needed = max(longest, needed) if config.data.packing else longest
    parallel, blocks = config.parallel, [size for _, size in config.objective.block_sizes]
    multiple = math.lcm(8, 2 * parallel.cp * parallel.tp, *blocks, _largest_block(config, model))
    rounded = min(-(-needed // multiple), max(1, limit // multiple)) * multiple
    return config.replace(seq_length=min(rounded, limit))


def resolve_objective(config: Config, model: Any, step: int = 0) -> tuple[Config, Objective]:
    """Resolve the configuration by `with_objective`, and construct the objective for the step after `step`. Sets the
    block size of `block_schedule` in the model's config, which may have none. Raises SettingError."""
    config = with_objective(config, model)
    if (size := scheduled_block_size(config, step + 1)) is not None:
        model.config.block_size = size
    options = config.objective
    name, weight = str(options.objective), options.certainty_weight
    objective = build_objective(
        name,
        noise_token_id(model, name),
        options.length_variation,
        model.config,
        options.loss_weighting,
        options.loss_normalisation,
        noise_range=options.noise_levels,
        edit_probability=options.edit_probability,
        indel_probability=options.indel_probability,
        p_uniform=options.p_uniform,
        max_deletions=options.max_deletions,
        merge_probability=options.merge_probability,
        auto_balance=options.auto_balance or None,
        buffer_size=options.buffer_size,
        trajectory_steps=options.trajectory_steps,
        trajectory_block=options.trajectory_block,
        trajectory_complement=options.trajectory_complement,
        certainty=Certainty(weight, options.certainty_temperature) if weight else None,
        ordinary_mask=model.family.ordinary_mask if hasattr(model, "family") else None,
    )
    record_noise(config, model.config, objective)
    return config, objective


def record_noise(config: TrainConfig, model_config: Any, objective: Objective) -> None:
    """Record the noise process in the model's config, which selects samplers and evaluation, unless it is the recorded
    one. Raises SettingError if only an adapter is trained, which has no config for it."""
    recorded = {key: getattr(model_config, key, None) for key in objective.model_config}
    before = recorded | {"noise_process": noise_process(model_config) or "mask"}
    if before == objective.model_config:
        return
    if config.model.adapts:
        raise SettingError(
            "objective",
            f"{config.objective.objective}: an adapter cannot record its {objective.noise_process} noise: train all "
            "weights",
        )
    for key, value in objective.model_config.items():
        setattr(model_config, key, value)


def check_data(config: TrainConfig, load: bool = True) -> DataSources:
    """Find the training and validation data, and check what needs no model.

    Args:
        load: see `find_data`.

    Raises:
        SettingError: `data` names nothing, or a blend is not W PATH W PATH ...
        InputFileError: a Megatron pair is damaged or shorter than a block.
    """
    found = find_run_data(*config.data.paths(stage=load), load)
    found.check(config.data.seq_length)
    if config.task == "sft":
        for part in found.all_parts:
            check_sources(part)
    return found


def load_data(config: TrainConfig, model: Any, mask_token: int | None) -> tuple[Samples, Samples, Any]:
    """Load the training samples, the validation samples and the tokenizer (None if the model has none and the data
    need none).

    Args:
        mask_token: None if the objective masks nothing.

    Raises:
        InputFileError: the data cannot be read or do not fit the vocabulary.
        CheckpointError: the tokenizer cannot be loaded.
    """
    found = find_run_data(*config.data.paths())
    if config.task == "sft":
        return load_conversations(config, model, found, mask_token)
    reader = ReaderSettings(
        seq_length=config.data.seq_length,
        seed=config.data.seed,
        shares=config.data.split_fractions,
        fit=TokenLimits(model.get_input_embeddings().weight.shape[0], mask_token),
        with_documents=config.data.document_attention,
    )
    tokenizer = None
    try:
        tokenizer = load_tokenizer(config)
    except DlmBridgeError:
        if found.has_text or config.model.tokenizer or config.logging.sample_prompt:
            raise
    if tokenizer is not None:
        align_special_tokens(model, tokenizer, config.model.model)
    train, valid = found.sections(reader, tokenizer)
    return train, valid, tokenizer


def load_conversations(
    config: TrainConfig, model: Any, found: DataSources, mask_token: int | None
) -> tuple[Samples, Samples, Any]:
    """Load training samples, validation samples and tokenizer of fine-tuning; see `load_data`. The configuration is
    from `with_family_defaults`."""
    tokenizer, settings = conversation_settings(config, model, mask_token)

    def cut(part: Part, shares: Shares) -> tuple[Blocks, Blocks]:
        sources = cast(Sequence[Source], part)  # checked by `check_sources`
        return split(load_conversation_blocks(sources, tokenizer, settings), shares)[:2]

    train, valid = found.mixed(cut, config.data.split_fractions, config.data.seed)
    return train, valid, tokenizer


def conversation_settings(config: TrainConfig, model: Any, mask_token: int | None) -> tuple[Any, ConversationSettings]:
    """Load the tokenizer, and construct the settings that lay out conversations in rows. The configuration is from
    `with_family_defaults`."""
    tokenizer = load_tokenizer(config)
    kind = find_objective(str(config.objective.objective)).kind
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    check_tokenizer(tokenizer, vocabulary_size, mask_token)
    align_special_tokens(model, tokenizer, config.model.model)
    return tokenizer, ConversationSettings(
        seq_length=config.data.seq_length,
        mask_token_id=mask_token,
        packing=config.data.packing,
        truncate=config.data.truncate,
        eos_padding=cast(EosPadding, config.data.eos_padding),
        block_size=_largest_block(config, model),
        train_on_prompt=bool(config.data.train_on_prompt),
        answer_blocks=kind.answer_blocks,
        trajectories=kind.trajectories,
        vocabulary_size=vocabulary_size,
        image_token_ids=image_token_ids(model.config),
    )


def _largest_block(config: TrainConfig, model: Any) -> int:
    """Largest block size of the run, which is a multiple of the schedule's smaller ones; 1 without blocks."""
    kind = find_objective(str(config.objective.objective)).kind
    if kind.streams == 1:
        return 1
    if config.objective.block_sizes:
        return config.objective.block_sizes[-1][1]
    return int(kind.settings(model.config).get("block_size", kind.block_size))  # type: ignore[attr-defined,arg-type]
