"""Autoregressive models: TRL's GRPOTrainer and DPOTrainer on our rows, rewards, metrics and checkpoints."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback

from dlm_bridge.convert.atomic import publish_folder
from dlm_bridge.errors import DlmBridgeError, printable
from dlm_bridge.hub import TRACKER
from dlm_bridge.train.accelerate.attention import set_attention
from dlm_bridge.train.accelerate.optimizers import adamw
from dlm_bridge.train.checkpoints import (
    TRL_STATE,
    checkpoint_errors,
    gather_digests,
    raised_everywhere,
    remove_old_checkpoints,
    run_checkpoints,
    step_folder,
)
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import SAMPLED
from dlm_bridge.train.data.documents import check_tokenizer
from dlm_bridge.train.loading import load_model, load_tokenizer, model_family
from dlm_bridge.train.lora import add_adapter, with_lora
from dlm_bridge.train.metrics import MetricsFile, TrainingProgress, plot_loss
from dlm_bridge.train.rl.methods import check_method
from dlm_bridge.train.rl.reward_worker import RewardWorkers
from dlm_bridge.train.rl.rows import Problem, load_pairs, load_problems, read_rows
from dlm_bridge.train.rl.trainer import PreferenceRow, RolloutRow
from dlm_bridge.train.schedule import learning_rate
from dlm_bridge.train.setup import check_length, resume_point, start_run, write_config
from dlm_bridge.train.trainer import catch_sigterm

UNFINISHED = re.compile(r"checkpoint-\d+")  # as it names folders


def train_with_trl(config: RLConfig, resume: bool, console: Console) -> Path:
    """As `dlm_bridge.train.rl.engine.train`, for `grpo` and `dpo`."""
    if importlib.util.find_spec("trl") is None:
        raise DlmBridgeError(
            f"--method {config.rl.method} is TRL's, which is not installed: pip install 'dlm-bridge[rl]'"
        )
    processes = PartialState(cpu=not torch.accelerator.is_available())
    main = processes.is_main_process
    config.check_batch(processes.num_processes)
    start = start_run(config, resume, main, console, partial(resume_point, required=TRL_STATE))
    if start.finished is not None:
        return start.finished
    if main:
        _remove_unfinished(start.output)
    if (Path(config.model.path) / TRACKER).is_file():
        raise DlmBridgeError(
            f"--model {config.model.path}: TRL reads models in the Hub's layout: dlm-bridge export it first"
        )
    model = load_model(config)  # on a resume, too: TRL makes the reference of it, then reads the checkpoint
    check_method(config, model_family(model))
    check_length(config, model)
    if config.engine.attention_backend is not None:
        set_attention(model, config.engine.attention_backend)
    config = with_lora(config, model)
    if config.model.adapts:
        model = add_adapter(config, model).peft
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0], None)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if main:
        write_config(config, start.output)
    reward_workers = [
        RewardWorkers([name], config.rl.reward_timeout, config.rl.reward_failure) for name in config.rl.reward
    ]
    try:
        trainer = _trainer(config, model, tokenizer, reward_workers)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Reporter(config, trainer, console, start.step, reward_workers, tokenizer))
        trainer.train(resume_from_checkpoint=None if start.checkpoint is None else str(start.checkpoint))
    finally:
        for workers in reward_workers:
            workers.close()
    return run_checkpoints(start.output)[-1][1]


def trainer_arguments(config: RLConfig, processes: int) -> dict[str, Any]:
    """Arguments of both of TRL's trainers. A step of ours is `updates` of theirs."""
    micro, accumulation = config.data.accumulation(processes)
    interval = config.checkpoint.save_interval or config.schedule.steps
    return {
        "output_dir": str(Path(config.checkpoint.output) / "checkpoints"),
        "max_steps": config.schedule.steps * config.rl.updates,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": config.optimizer.lr,
        "max_grad_norm": config.optimizer.clip_grad,
        "gradient_checkpointing": config.engine.gradient_checkpointing,
        "bf16": config.precision.name == "bf16",
        "fp16": config.precision.name == "fp16",
        "use_cpu": not torch.accelerator.is_available(),
        "seed": config.data.seed,
        "data_seed": config.data.seed,
        "logging_steps": config.rl.updates,
        "logging_first_step": False,
        "save_strategy": "steps",
        "save_steps": interval * config.rl.updates,
        "report_to": "none",
        "disable_tqdm": True,
        "disable_dropout": True,
        "beta": config.rl.kl_weight,
    }


def _trainer(config: RLConfig, model: Any, tokenizer: Any, reward_workers: Sequence[RewardWorkers]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    common = trainer_arguments(config, processes)
    optimizer = adamw(config, model)

    def share(update: int) -> float:
        return (
            learning_rate(config, update // config.rl.updates + 1) / config.optimizer.lr
            if config.optimizer.lr
            else 0.0
        )

    shared = {
        "model": model,
        "processing_class": tokenizer,
        "optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)),
    }
    if config.rl.method == "dpo":
        load_pairs(
            config.data.paths, tokenizer, config.data.seq_length, None
        )  # which names a bad row, its file and line
        return _own(DPOTrainer)(
            args=DPOConfig(**common, max_length=config.data.seq_length),
            train_dataset=Dataset.from_list(_preferences(config.data.paths)),
            **shared,
        )
    problems = load_problems(config.data.paths, tokenizer, config.data.seq_length - config.rl.gen_length, None)
    arguments = GRPOConfig(
        **common,
        num_generations=config.rl.group_size,
        num_iterations=config.rl.updates,
        max_completion_length=config.rl.gen_length,
        temperature=config.rl.temperature,
        generation_kwargs=config.rl.sampler or None,
        epsilon=config.rl.clip_range,
        scale_rewards="group" if config.rl.advantages == "scaled" else "none",
        loss_type={"rows": "grpo", "tokens": "dapo"}[config.rl.normalisation],
        reward_weights=[workers.functions[0].weight for workers in reward_workers],
    )
    return _own(GRPOTrainer)(
        args=arguments,
        reward_funcs=[_reward(workers, problems) for workers in reward_workers],
        train_dataset=Dataset.from_list(
            [{"prompt": problem.prompt, "problem": number} for number, problem in enumerate(problems)]
        ),
        **shared,
    )


def _reward(workers: RewardWorkers, problems: Sequence[Problem]) -> Callable[..., list[float]]:
    """A reward as TRL calls it."""
    (function,) = workers.functions

    def reward(prompts: Any, completions: Any, problem: list[int], **_: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return workers(prompts, texts, [problems[number] for number in problem]).parts[function.name]

    reward.__name__ = function.name
    return reward


def _preferences(items: list[str]) -> list[dict[str, Any]]:
    return [{name: row.fields[name] for name in ("prompt", "chosen", "rejected")} for row in read_rows(items)]


def _remove_unfinished(output: Path) -> None:
    """Remove what a killed or failed run left of a checkpoint."""
    for folder in (output / "checkpoints").glob("checkpoint-*"):
        if UNFINISHED.fullmatch(folder.name):
            shutil.rmtree(folder)


def _own(kind: type[Any]) -> type[Any]:
    """One of TRL's trainers that names checkpoints as we do, once they are whole, and sends nothing."""

    class Trainer(kind):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            output, step = Path(self.args.output_dir).parent, self.checkpoint_step()
            try:
                with raised_everywhere(), checkpoint_errors(output, step):
                    super()._save_checkpoint(model, trial)
                with raised_everywhere(), checkpoint_errors(output, step):
                    if self.accelerator.is_main_process:
                        self.finish_checkpoint()
            except DlmBridgeError:
                if self.accelerator.is_main_process:
                    _remove_unfinished(output)
                raise

        def create_model_card(self, *args: Any, **kwargs: Any) -> None:
            pass

        def _send_telemetry(self) -> None:
            pass

    Trainer.__name__ = kind.__name__
    return Trainer


class _Reporter(TrainerCallback):
    """Metrics, held-out rewards, checkpoints' names, and the ends of a run that come from outside."""

    def __init__(
        self,
        config: RLConfig,
        trainer: Any,
        console: Console,
        step: int,
        reward_workers: Sequence[RewardWorkers],
        tokenizer: Any,
    ) -> None:
        self.config, self.trainer, self.reward_workers, self.tokenizer = config, trainer, reward_workers, tokenizer
        self.output, self.console = Path(config.checkpoint.output), console
        self.main: bool = trainer.accelerator.is_main_process
        self.metrics = MetricsFile(self.output / "metrics.jsonl", step) if self.main else None
        self.stack = contextlib.ExitStack()
        self.progress = TrainingProgress(console, config.schedule.steps, step, self.main)
        self.problems = (
            load_problems(config.rl.eval_data, tokenizer, config.data.seq_length - config.rl.gen_length, None)
            if config.rl.eval_data and config.rl.method in SAMPLED
            else []
        )
        trainer.finish_checkpoint = self.finish_checkpoint
        trainer.checkpoint_step = lambda: trainer.state.global_step // config.rl.updates
        before = self.metrics.rows[-1]["tokens"] if self.metrics is not None and self.metrics.rows else 0
        self.tokens = before  # trained on so far
        self.uncounted = before if config.rl.method == "dpo" else 0  # of which TRL's count begins anew on a resume

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.terminated = self.stack.enter_context(catch_sigterm())
        self.stack.enter_context(self.progress)
        self.began = self.last = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.config.rl.updates:
            return
        limit = self.config.schedule.exit_duration
        late = limit is not None and time.monotonic() - self.began >= 60 * limit
        own = torch.tensor(float(late or self.terminated.is_set()), device=self.trainer.accelerator.device)
        step = state.global_step // self.config.rl.updates
        last = bool(self.trainer.accelerator.reduce(own, "sum") > 0)
        if last or step == self.config.schedule.steps or step in self.config.checkpoint.saves:
            control.should_save = True
        control.should_training_stop = control.should_training_stop or last

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs or state.global_step % self.config.rl.updates:
            return
        step = state.global_step // self.config.rl.updates
        held_out: dict[str, Any] = {}
        interval = self.config.logging.eval_interval
        if self.problems and interval and (step % interval == 0 or step == self.config.schedule.steps):
            held_out = self._held_out()
        now = time.monotonic()
        tokens = int(logs["num_tokens"]) + self.uncounted
        speed = (tokens - self.tokens) / max(now - self.last, 1e-9)
        self.last, self.tokens = now, tokens
        common: dict[str, Any] = {
            "step": step,
            "loss": logs["loss"],
            "grad_norm": float(logs["grad_norm"]),
            "lr": learning_rate(self.config, step),
            "tokens": tokens,
            "tokens_per_s": speed,
            "tokens_per_s_per_device": speed / self.trainer.accelerator.num_processes,
            "mfu": None,
            "peak_memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        }
        if self.metrics is not None:
            row = (
                self._sampled(common, logs, held_out) if self.config.rl.method == "grpo" else _preferred(common, logs)
            )
            self.metrics.append(row)
            self.progress.show(row)

    def finish_checkpoint(self) -> None:
        """Rename the newest checkpoint, now that it is complete, and remove old ones."""
        root = self.output / "checkpoints"
        for folder in root.glob("checkpoint-*"):
            if UNFINISHED.fullmatch(folder.name) and (folder / TRL_STATE).is_file():
                gather_digests(folder)
                publish_folder(folder, step_folder(self.output, self.trainer.checkpoint_step()))
        remove_old_checkpoints(self.output, self.config.checkpoint.keep_last)
        if self.metrics is not None:
            self.metrics.sync()
            plot_loss(self.metrics.rows, self.output / "loss.png")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stack.close()
        if self.metrics is not None:
            self.metrics.close()
            folder = run_checkpoints(self.output)[-1][1]
            self.console.print(printable(f"done: the model is at {folder}"), highlight=False, soft_wrap=True)

    def _sampled(self, common: dict[str, Any], logs: dict[str, Any], held_out: dict[str, Any]) -> RolloutRow:
        functions = [workers.functions[0].name for workers in self.reward_workers]
        return RolloutRow(
            **common,
            reward=logs["reward"],
            reward_std=logs["reward_std"],
            rewards={name: logs[f"rewards/{name}/mean"] for name in functions},
            failed_rewards=0,
            idle_groups=logs["frac_reward_zero_std"],
            kl=logs.get("kl"),
            clip_fraction=logs["clip_ratio/region_mean"],
            completion_length=logs["completions/mean_length"],
            **held_out,
        )

    @torch.no_grad()
    def _held_out(self) -> dict[str, Any]:
        """The rewards of greedy answers, each process answering its share."""
        accelerator, model = self.trainer.accelerator, self.trainer.accelerator.unwrap_model(self.trainer.model)
        own = self.problems[accelerator.process_index :: accelerator.num_processes]
        texts: list[str] = []
        training = model.training
        model.eval()
        for start in range(0, len(own), self.trainer.args.per_device_train_batch_size):
            batch = self.tokenizer(
                [problem.text for problem in own[start : start + self.trainer.args.per_device_train_batch_size]],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
                return_token_type_ids=False,
            ).to(accelerator.device)
            output = model.generate(
                **batch,
                do_sample=False,
                max_new_tokens=self.config.rl.gen_length,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            texts += self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        model.train(training)
        means, total = {}, 0.0
        for workers in self.reward_workers:
            (function,) = workers.functions
            part = sum(workers([problem.prompt for problem in own], texts, own).parts[function.name]) if own else 0.0
            summed = accelerator.reduce(torch.tensor(part, device=accelerator.device), "sum")
            means[function.name] = float(summed) / len(self.problems)
            total += function.weight * means[function.name]
        return {"eval_reward": total, "eval_rewards": means}


def _preferred(common: dict[str, Any], logs: dict[str, Any]) -> PreferenceRow:
    return PreferenceRow(**common, preferred=logs["rewards/accuracies"], margin=logs["rewards/margins"])
