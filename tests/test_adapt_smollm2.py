"""scripts/adapt_smollm2.py from its data to its figures, on a tiny model in the place of the published one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints import write_tokenizer

SCRIPT = Path(__file__).parents[1] / "scripts" / "adapt_smollm2.py"
EOS = 258
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}


@pytest.mark.slow
def test_from_data_to_figures(tmp_path: Path) -> None:
    output, data = tmp_path / "adapted", tmp_path / "data"
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=EOS))
    model.save_pretrained(output / "smollm2")  # where the script looks before it fetches
    write_tokenizer(output / "smollm2", TOKENIZER)
    data.mkdir()
    for split, count in (("train", 20), ("test", 5)):
        rows = [
            {"question": f"{n} and {n}?", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(count)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    command = [sys.executable, SCRIPT, "--preset", "cpu", "--data", data, "--output", output]
    figures, both = output / "figures.json", ["autoregressive", "diffusion"]
    for only, models in ((["--only"], []), (["--only", "diffusion"], ["diffusion"]), ([], both)):  # as on several GPUs
        done = subprocess.run([*command, *only], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        found = json.loads(figures.read_text()) if figures.exists() else {"models": {}}
        assert list(found["models"]) == models
    assert found["rows"]["train"] == 16  # the preset's
    assert (output / "curves.png").stat().st_size > 0
    for measured in found["models"].values():
        answers = measured["answers"]
        assert [sample["question"] for sample in answers["samples"]] == ["0 and 0?", "1 and 1?", "2 and 2?"]
        assert 0 <= answers["correct"] <= answers["problems"] == 4
        assert 0 <= answers["ended"] <= 4
        assert measured["likelihood"]["nats"] > 0
        assert [step for step, _ in measured["training"]["curve"]][-1] == found["steps"] == 4
    conversations = [json.loads(line) for line in (output / "rows" / "train.jsonl").read_text().splitlines()]
    assert conversations[3]["messages"][1]["content"] == "6\n#### 6"  # without the calculator's annotation
