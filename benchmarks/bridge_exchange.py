"""Checkpoints exchanged with Megatron Bridge, both ways: whether every tensor is equal, and the seconds of each side.

    python benchmarks/bridge_exchange.py --bridge-python "env PYTHONPATH=/opt/bridge python3.12" --folder /fast/disk

Megatron Bridge pins another transformers, so it runs by a command of its own, in an environment of its own; it needs a
GPU. For each family a Hub folder with random weights is written, with the widths of a public model in fewer layers.
Both sides import it. Then dlm-bridge exports the checkpoint that Megatron Bridge has written, and Megatron Bridge the
one of dlm-bridge; every tensor of both exports is compared with the source. Each conversion is a process of its own
with one rank, and is timed from the first look at the source until the files are on the disk, start-up apart. Prints
a line of JSON for each import and export. `ratio` is Megatron Bridge's seconds over dlm-bridge's.

Without --bridge-python only dlm-bridge runs, and exports its own checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from conversion import LLADA, write_random
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

BASE: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **BASE, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# The widths of the public models, and layers for 2.5 to 3.7 GB.
FAMILIES: dict[str, dict[str, Any]] = {
    "LLaDA-1.5": {
        **LLADA, "n_layers": 2, "vocab_size": 126464, "embedding_size": 126464, "mlp_ratio": 4,
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "residual_dropout": 0.0, "init_std": 0.02,
        "mask_token_id": 126336, "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"},
    },
    "Nemotron-Labs-Diffusion": {
        **BASE, "architectures": ["NemotronLabsDiffusionModel"], "model_type": "nemotron_labs_diffusion",
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 2,
        "num_key_value_heads": 8, "vocab_size": 131072, "tie_word_embeddings": False, "mlp_bias": False,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "sliding_window": None, "mask_token_id": 100,
        "block_size": 32, "dlm_paradigm": "bidirectional", "ar_loss_weight": 1.0, "dlm_loss_weight": None,
        "dp_varying_mask_ratio": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        },
        "auto_map": {"AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig"},
    },
    "Qwen3": {
        **QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048,
        "intermediate_size": 6144, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "max_window_layers": 28, "tie_word_embeddings": True,
    },
    "Qwen3-MoE": {
        **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
    },
}  # fmt: skip
# Megatron Bridge builds Nemotron-Labs-Diffusion with 32 heads of 128, whatever config.json says.
TINY: dict[str, Any] = {
    "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 256, "embedding_size": 256, "mask_token_id": 100, "num_hidden_layers": 2,
}  # fmt: skip
# The public folders bring their config class. This one has every key of config.json as an attribute, as theirs.
CONFIG_CLASS = """from transformers import PretrainedConfig


class {name}(PretrainedConfig):
    model_type = "{model_type}"
"""
# Both run in a process of their own: ACTION HUB SOURCE OUTPUT FIGURES.
TIMED = """
import json, os, sys, time
action, hub, source, output, figures = sys.argv[1:]
start = time.perf_counter()
try:
    {start}
    os.sync()
    ready = time.perf_counter()
    if action == "import":
        {imports}
    else:
        {exports}
    os.sync()
    found = {{"seconds": time.perf_counter() - ready, "start_s": ready - start}}
except BaseException as error:
    found = {{"error": f"{{type(error).__name__}}: {{' '.join(str(error).split())[:300]}}"}}
    raise
finally:
    with open(figures, "w") as file:
        json.dump(found, file)
"""
BRIDGE = TIMED.format(  # which registers LLaDA's bridge by an import of its own
    start="from megatron.bridge import AutoBridge; import megatron.bridge.training.model_load_save\n"
    "    import megatron.bridge.diffusion.conversion.llada15",
    imports="AutoBridge.import_ckpt(source, output, trust_remote_code=True)",
    exports="AutoBridge.from_hf_pretrained(hub, trust_remote_code=True).export_ckpt(source, output)",
)
OURS = TIMED.format(
    start="import dlm_bridge.bridge",
    imports="dlm_bridge.bridge.Bridge.from_hf(source).to_megatron(output, run_config=True)",
    exports="dlm_bridge.bridge.Bridge.from_megatron(source, like=hub).to_hf(output)",
)


def main() -> None:
    """Parse the options, exchange every family, print its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bridge-python", default="", metavar="COMMAND", help="Megatron Bridge's interpreter")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--tiny", action="store_true", help="of small widths")
    parser.add_argument("--folder", type=Path, help="where to write (five times a model); a temporary folder else")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a conversion (%(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for what Megatron Bridge prints")
    options = parser.parse_args()
    for family in options.families:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            exchange(family, Path(folder), options)


def exchange(family: str, folder: Path, options: argparse.Namespace) -> None:
    """Import and export by both sides, and print both."""
    hub = write_hub(folder / "hub", FAMILIES[family], options.tiny)
    size = sum(file.stat().st_size for file in hub.iterdir()) / 1e9
    sides = {"bridge": shlex.split(options.bridge_python), "ours": [sys.executable]}

    def convert(side: str, action: str, source: Path, output: Path) -> dict[str, Any]:
        log = options.logs and options.logs / f"{family}_{side}_{action}.log"
        return run(
            sides[side], side, [action, *map(str, (hub, source, output))], folder / "figures", log, options.limit
        )

    imported = {side: convert(side, "import", hub, folder / side) for side, command in sides.items() if command}
    line = {"family": family, "gb": round(size, 2)}
    theirs = folder / ("bridge" if sides["bridge"] else "ours")
    exported = {}
    if "error" not in imported.get("bridge", imported["ours"]):
        exported["ours"] = convert("ours", "export", theirs, folder / "by_ours")
    result = compare(hub, folder / "by_ours", exported.get("ours", {}), {"": imported.get("bridge", imported["ours"])})
    print(json.dumps({**line, "action": "import", **times(imported), "read by dlm-bridge": result}), flush=True)
    shutil.rmtree(folder / "by_ours", ignore_errors=True)
    result = "not run"
    if sides["bridge"]:
        exported["bridge"] = convert("bridge", "export", folder / "ours", folder / "by_bridge")
        result = compare(hub, folder / "by_bridge", exported["bridge"], {"ours": imported["ours"]})
    print(json.dumps({**line, "action": "export", **times(exported), "read by Megatron Bridge": result}), flush=True)


def write_hub(folder: Path, config: dict[str, Any], tiny: bool) -> Path:
    """Write a Hub folder with random weights, the config class that its config.json names, and a tokenizer."""
    if tiny:
        config = config | {key: value for key, value in TINY.items() if key in config}
    write_random(folder, config)
    if "auto_map" in config:
        module, name = config["auto_map"]["AutoConfig"].split(".")
        (folder / f"{module}.py").write_text(CONFIG_CLASS.format(name=name, model_type=config["model_type"]))
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def run(
    command: list[str], side: str, words: list[str], figures: Path, log: Path | None, limit: float
) -> dict[str, Any]:
    """One conversion's figures: seconds, or the error."""
    code = BRIDGE if side == "bridge" else OURS
    figures.unlink(missing_ok=True)
    try:
        ended = subprocess.run(
            [*command, "-c", code, *words, str(figures)], check=False, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {limit:.0f} s"}
    said = ended.stdout + ended.stderr
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(said)
    if not figures.is_file():
        return {"error": (said.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def times(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Seconds of both sides, their start-up, and the ratio; an error in the place of seconds."""
    line: dict[str, Any] = {}
    for side in ("bridge", "ours"):
        figures = found.get(side, {"error": "not run"})
        line[f"{side}_s"] = round(figures["seconds"], 2) if "seconds" in figures else figures["error"]
        line[f"{side}_start_s"] = round(figures.get("start_s", 0), 1)
    if all("seconds" in found.get(side, {}) for side in ("bridge", "ours")):
        line["ratio"] = round(found["bridge"]["seconds"] / found["ours"]["seconds"], 2)
    return line


def compare(hub: Path, output: Path, exported: dict[str, Any], imported: dict[str, dict[str, Any]]) -> str:
    """Whether an export has the source's tensors, and no other; or why there is none."""
    for figures in (*imported.values(), exported):
        if "error" in figures:
            return str(figures["error"])
    before, after = (open_tensors(folder) for folder in (hub, output))
    problems = [
        f"{what}: {', '.join(sorted(names)[:4])} ({len(names)})"
        for what, names in (("missing", before.keys() - after.keys()), ("more", after.keys() - before.keys()))
        if names
    ]
    different = [name for name in before.keys() & after.keys() if not same(before[name], after[name], name)]
    if different:
        problems.append(f"different: {', '.join(sorted(different)[:4])} ({len(different)})")
    return "; ".join(problems) or f"{len(before)} tensors equal"


def open_tensors(folder: Path) -> dict[str, Any]:
    """The file that has a tensor, by the tensor's name."""
    files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def same(before: Any, after: Any, name: str) -> bool:
    one, other = before.get_tensor(name), after.get_tensor(name)
    return one.dtype == other.dtype and torch.equal(one, other)


if __name__ == "__main__":
    main()
