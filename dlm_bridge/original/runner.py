"""The original side of `dlm-bridge verify` against the original: results of a checkpoint's own remote code.

This script runs under another interpreter, with the versions of torch and transformers that the code was written for,
and imports nothing of this package. It reads request.json in the given folder and writes result.json and
logits.safetensors there. It ends when its standard input is closed, which the parent process keeps open.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any

AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModel", "AutoModelForMaskedLM")  # in order of preference


def main(folder: Path) -> None:
    """Load the checkpoint of request.json with its own code and write the results."""
    request = json.loads((folder / "request.json").read_text("utf-8"))
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(request["checkpoint"], trust_remote_code=True)
    model = _load(config, request["checkpoint"])
    predict = _Predictor(model, request["block"])
    tokens = torch.tensor([request["tokens"]])
    logits = predict(tokens)
    save_file({"logits": logits.contiguous()}, str(folder / "logits.safetensors"))
    picks = greedy_sample(predict, tokens[:, : request["prompt"]], request)
    base = transformers.PretrainedConfig().to_dict()
    values = _config_values(config)
    result = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "class_name": type(model).__name__,
        "config": {key: value for key, value in values.items() if _is_json(value)},
        "class_keys": sorted(key for key in values if key not in base),
        "tensors": _tensors(model),
        "picks": picks,
    }
    (folder / "result.json").write_text(json.dumps(result), "utf-8")


def greedy_sample(predict: Any, prompt_1P: Any, request: dict[str, Any]) -> list[list[int]]:
    """[position, token] of each step, which commits the most probable token of all masked positions."""
    import torch

    mask, shift = request["mask_token_id"], request["shift"]
    canvas = torch.cat([prompt_1P, torch.full((1, request["steps"]), mask)], dim=1)
    picks = []
    for _ in range(request["steps"]):
        scores_SV = torch.log_softmax(predict(canvas)[0], dim=-1)
        scores_SV = torch.cat([scores_SV[:1], scores_SV[:-1]]) if shift else scores_SV
        scores_SV[:, mask] = -torch.inf
        best_S, tokens_S = scores_SV.max(dim=-1)
        position = int(best_S.masked_fill(canvas[0] != mask, -torch.inf).argmax())
        canvas[0, position] = tokens_S[position]
        picks.append([position, int(tokens_S[position])])
    return picks


class _Predictor:
    """Logits [1, S, V] of a model in fp32; with `block`, under a block-causal attention mask."""

    def __init__(self, model: Any, block: int | None) -> None:
        import inspect

        self.model, self.block = model, block
        parameters = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in parameters else {}

    def __call__(self, tokens_1S: Any) -> Any:
        import torch

        options: dict[str, Any] = dict(self.options)
        if self.block is not None:
            blocks_S = torch.arange(tokens_1S.shape[1]) // self.block
            options["attention_mask"] = (blocks_S[None, :] <= blocks_S[:, None])[None, None]
        with torch.no_grad():
            logits = getattr(self.model(input_ids=tokens_1S, **options), "logits", None)
        if logits is None:
            raise SystemExit(f"{type(self.model).__name__} returns no logits")
        return logits.float()


def _load(config: Any, checkpoint: str) -> Any:
    import torch
    import transformers

    auto_map = getattr(config, "auto_map", None) or {}
    name = next((each for each in AUTO_CLASSES if each in auto_map), None)
    if name is None:
        raise SystemExit(f"auto_map names none of {', '.join(AUTO_CLASSES)}")
    dtype = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options: dict[str, Any] = {dtype: torch.float32, "trust_remote_code": True}
    return getattr(transformers, name).from_pretrained(checkpoint, **options).eval()


def _config_values(config: Any) -> dict[str, Any]:
    """The config's values, including those that transformers 5 moves into rope_parameters."""
    values = config.to_dict()
    rope = values.get("rope_parameters")
    return {**(rope if isinstance(rope, dict) else {}), **values}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _tensors(model: Any) -> dict[str, dict[str, Any]]:
    """Shape of each tensor of the state dict, the name of a tensor with the same storage, and whether it is a
    parameter."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shared = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        tensors[name] = {
            "shape": list(tensor.shape),
            "shares": None if shared == name else shared,
            "parameter": name in parameters,
        }
    return tensors


def _end_with_parent() -> None:
    while os.read(0, 1):  # without the lock of sys.stdin, which the end of the interpreter needs
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]))
