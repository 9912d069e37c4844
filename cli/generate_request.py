"""What the command line of `dlm-bridge generate` says: its settings, its options, and which of them contradict."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_bridge.distributed import world_size
from dlm_bridge.errors import DlmBridgeError

# The settings that most calls need; --set has every other one. Each is a field of DiffusionGenerationConfig.
SETTINGS: dict[str, tuple[type, str]] = {
    "gen_length": (int, "New tokens, at most."),
    "steps": (int, "Denoising steps, of each block in illada, llada2, llada2.2 and sdar, else of the whole text."),
    "block_length": (int, "Tokens that are denoised together."),
    "temperature": (float, "0: greedy."),
    "top_k": (int, "Draw from the k best tokens only."),
    "top_p": (float, "Draw from the best tokens up to a probability of p."),
    "threshold": (float, "Confidence that commits a token."),
    "cfg_scale": (float, "Classifier-free guidance, 0: off."),
    "algorithm": (str, "The sampler; the family's own by default."),
    "cache": (str, "KV cache: none, block, prefix or dual."),
    "execution": (str, "Execution: eager, graph (the default on a GPU) or compiled."),
    "seed": (int, "The same seed, the same text."),
}
ALIASES = {"gen_length": ("max_new_tokens",)}  # transformers' names
# Arguments of `generate` in Python that are not settings, and settings that the command itself sets.
NO_SETTINGS = (
    "attention_mask", "commit_rule", "generation_config", "generator", "input_ids", "inputs", "output_history",
    "return_dict_in_generate", "streamer", "tokenizer",
)  # fmt: skip
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Arguments:
    """The options of one invocation."""

    model: str
    settings: dict[str, Any]
    prompt: str | None
    chat: bool
    system: str | None
    template_args: dict[str, Any]
    jsonl: str | None
    field: str
    batch_size: int | None  # None: as many as memory allows
    commit_steps: bool
    output: Path | None
    overwrite: bool
    resume: bool
    show: bool
    html: Path | None
    svg: Path | None
    as_json: bool
    dtype: str
    device: str | None
    device_map: str | None
    offload_folder: str | None
    tp_plan: str | None
    tp: int | None
    tokenizer: str | None
    family: str | None
    revision: str | None
    like: str | None

    def check(self) -> None:
        """Raise DlmBridgeError for options that contradict each other."""
        if self.prompt is None and self.jsonl is None:
            raise DlmBridgeError("no prompt: give --prompt TEXT, or a file of prompts with --jsonl FILE")
        if self.jsonl is not None:
            single = {"--prompt": self.prompt is not None, "--show": self.show, "--html": self.html, "--svg": self.svg}
            for option, given in single.items():
                if given:
                    raise DlmBridgeError(
                        f"{option} needs a single prompt, --jsonl is a file of prompts: use one of them"
                    )
            if self.as_json and self.output is None:
                raise DlmBridgeError("--json with --jsonl prints a summary of the output file: set --output FILE")
        if self.commit_steps and (self.jsonl is None or self.settings.get("infill")):
            raise DlmBridgeError(
                "--commit-steps records the answers to a file of prompts: use it with --jsonl and without --infill"
            )
        if self.resume and (self.jsonl is None or self.output is None):
            raise DlmBridgeError("--resume continues a file of prompts: set --jsonl and --output")
        if self.system is not None and not self.chat:
            raise DlmBridgeError("--system needs --chat")
        if self.template_args and not self.chat and self.jsonl is None:
            raise DlmBridgeError("--chat-template-args needs --chat")
        if self.jsonl == "-" and world_size() > 1:
            raise DlmBridgeError("--jsonl -: stdin is read by one process only: name a file")


def parse_batch_size(text: str) -> int | None:
    """The value of `--batch-size`: a number, or None for "auto". Raises DlmBridgeError."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise DlmBridgeError(f"--batch-size {text}: a number of rows, 1 or more, or auto")
    return int(text)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """The values of `--set name=value`, as `parse_pairs`. Raises DlmBridgeError, also for what is no setting."""
    values = parse_pairs(pairs, "--set", "a setting's name and value are needed, such as remasking=random")
    for name in values:
        if name in NO_SETTINGS:
            raise DlmBridgeError(f"--set {name}: an argument of generate in Python, no setting: leave it out")
    return values


def parse_template_args(pairs: list[str]) -> dict[str, Any]:
    """The values of `--chat-template-args name=value`, as `parse_pairs`. Raises DlmBridgeError."""
    flag = "--chat-template-args"
    values = parse_pairs(pairs, flag, "a variable of the template and its value are needed: enable_thinking=false")
    if values:
        from dlm_bridge.generation.prompts import check_template_args

        check_template_args(values, flag)
    return values


def parse_pairs(pairs: list[str], flag: str, needed: str) -> dict[str, Any]:
    """The values of `FLAG name=value`: JSON, Python's True, False and None, or else text. Raises DlmBridgeError, which
    says what is `needed`."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise DlmBridgeError(f"{flag} {pair}: {needed}")
        if name in values:
            raise DlmBridgeError(f"{flag} {name} is given twice")
        try:
            values[name] = json.loads(PYTHON_WORDS.get(text, text))
        except ValueError:
            values[name] = text
    return values
