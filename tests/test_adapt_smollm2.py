"""scripts/adapt_smollm2.py from its data to its figures, on a tiny model in the place of the published one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints import write_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import adapt_smollm2 as adapt

SCRIPT = Path(adapt.__file__)
EOS = 258
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}


def test_numbers_and_intervals() -> None:
    assert adapt.stated_number("3 + 4 = 7\n#### 1,007") == 1007
    assert adapt.stated_number("#### $2.5\n#### 1") == 2.5  # what follows the first is another question's
    assert adapt.stated_number("the answer is 7") is None
    assert adapt.last_number("the answer is 7.") == 7
    row = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so\n#### 18"}]
    assert adapt.is_right("#### 18.0", row)
    assert not adapt.is_right("18", row)
    assert adapt.is_right("18", row, adapt.last_number)
    assert adapt.wilson(36, 256) == pytest.approx((0.1033, 0.1885), abs=1e-3)  # of the literature's formula
    assert adapt.ratio_interval([True, False] * 50, [True, False] * 50) == (1.0, 1.0, 1.0)
    assert adapt.ratio_interval([True], [False]) is None
    ratio, low, high = adapt.ratio_interval([True, False] * 50, [True] * 100)
    assert ratio == 0.5
    assert 0.35 < low < 0.5 < high < 0.65
    rows = [
        {"tokens": [1, 2, 9], "reason": "stop", "forwards": 2},
        {"tokens": [1, 2], "reason": "length", "forwards": 2},
    ]
    assert adapt.tokens_per_forward(rows) == 1.0  # the token that ends a text does not count


@pytest.mark.slow
def test_from_data_to_figures(tmp_path: Path) -> None:
    """All stages, over calls that are cut off."""
    output, data, model = tmp_path / "adapted", tmp_path / "data", tmp_path / "model"
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    twin = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=EOS))
    twin.lm_head.weight.data[EOS + 1 :] = 0  # never the largest logit: the mask token, which `idlm` never writes
    twin.save_pretrained(model)
    write_tokenizer(model, TOKENIZER)
    data.mkdir()
    for split, count in (("train", 20), ("test", 5)):
        rows = [
            {"question": f"{n} and {n}?", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(count)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "code.jsonl").write_text(json.dumps({"prompt": "def double(n):"}) + "\n")

    def call(*more: str) -> list[dict[str, Any]]:
        options = ["--preset", "cpu", "--model", model, "--data", data, "--output", output, *more]
        options += ["--human-eval", data / "code.jsonl"]
        done = subprocess.run(
            [sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False, timeout=1200
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    said = call("--seconds", "3")
    assert "stopped" in said[-1]
    call("--stages", "prepare,adapter")
    said = call()
    assert [line["stage"] for line in said if "stage" in line] == list(adapt.STAGES)
    again = call()
    assert all("stage" in line for line in again)  # nothing is done again
    call("--stages", "drafts,measure,constrain", "--recipes", "distilled,whole", "--blocks", "4")
    results = {path.stem: json.loads(path.read_text()) for path in (output / "results").glob("*.json")}
    assert results["rows"]["train"] == 12
    assert results["rows"]["dev"] == 3
    conversations = [json.loads(line) for line in (output / "rows" / "test.jsonl").read_text().splitlines()]
    assert conversations[3]["messages"][1]["content"] == "6\n#### 6"  # without the calculator's annotation
    for block in (4, 8):
        tails, strided = (results[f"measured-drafts-{block}-n{block}-{how}-fp32"] for how in ("tails", "strided"))
        for found in (tails, strided):
            assert found["identical"] == found["of"] == 4
            assert found["right"] == results["measured-twin"]["right"]
        assert results[f"code-drafts-{block}"]["identical"] == 1
        assert tails["tokens_per_forward"] >= strided["tokens_per_forward"]
        assert results[f"drafts-{block}"]["steps"] == 4
    assert results["measured-drafts-8-n3-tails-fp32"]["identical"] == 4
    assert results["measured-distilled-4-n4-tails-fp32"]["identical"] == 4
    assert "identical" not in results["measured-whole-4-n4-tails-fp32"]  # its text is its own
    for recipe, block in (("drafts", 8), ("distilled", 4), ("whole", 4)):
        assert results[f"constrained-{recipe}-{block}-n{block}-tails-fp32"]["valid"] == 4
    assert results["speed-2-drafts-4-tails"]["tokens_per_s"] > 0
    assert "absent" in results["speed-1-vllm"] or results["speed-1-vllm"]["tokens_per_s"] > 0
    for how in ("tails", "strided"):
        found = results["adapter-measured-fp32"][how]
        assert found["identical"] == found["of"] > 0
    factors = load_file(output / "results" / "adapter" / "adapter_model.safetensors")
    assert {str(tensor.dtype) for tensor in factors.values()} == {"torch.bfloat16"}
    assert (output / "results" / "adaptation.png").stat().st_size > 0
