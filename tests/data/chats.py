"""A tokenizer with a chat template, and conversations."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}:\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
# As Qwen3's: only the last turn says what it thinks.
THINKING = (
    "{% for m in messages %}{{ m.role }}:\n{% if loop.last and m.role == 'assistant' %}think return\n{% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def three_steps(model: Path, data: Path, **changed: Any) -> dict[str, Any]:
    """Options of three steps of `sft`, which writes no checkpoint before its last."""
    options = {"task": "sft", "model": str(model), "data": [str(data)], "seq_length": 96, "micro_batch_size": 2}
    return options | {"steps": 3, "lr": 1e-3, "save_interval": 0} | changed


def chatty(tokenizer: Any, template: str | None = TEMPLATE) -> Any:
    """A copy of a tokenizer with a chat template."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def calling(arguments: Any, **changed: Any) -> dict[str, Any]:
    """An answer that only calls a tool."""
    call = {"type": "function", "id": "call00001", "function": {"name": "look_up", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]} | changed


def conversation(number: int) -> dict[str, Any]:
    """Conversation `number`, of one or two turns, of some length or other."""
    messages = [said("user", f"def f{number}"), said("assistant", f"(x): return x + {number}" * (1 + number % 3))]
    if number % 4 == 3:
        messages += [said("user", "def"), said("assistant", f"x + {number}")]
    return {"messages": messages}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
