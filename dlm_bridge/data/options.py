"""Settings of `preprocess`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from dlm_bridge.settings import common_option


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Settings of `dlm_bridge.data.preprocess.preprocess`, and the options of `dlm-bridge preprocess`.

    Args:
        inputs: text, JSONL or parquet files, folders, globs or datasets (NAME:CONFIG:SPLIT).
        output: prefix of the pair.
        tokenizer: folder or Hub id of the tokenizer.
        append_eod: end each document with the tokenizer's EOS token.
        json_key: field of JSON objects, or column of tables, that contains the text.
        workers: number of processes, each on one core; 1: this process, with the Rust tokenizer's own threads; None:
            one per core.
        resume: continue an interrupted call.
        overwrite: replace an existing pair.
    """

    inputs: list[str]
    output: str = common_option(MISSING, "Writes PREFIX.bin and PREFIX.idx.", metavar="PREFIX")
    tokenizer: str = common_option(MISSING, "Tokenizer folder or Hub id.")
    append_eod: bool = common_option(False, "End each document with the tokenizer's EOS token.", negative=None)
    json_key: str = common_option("text", "Field or column that contains the text.", aliases=("text_key",))
    workers: int | None = common_option(
        None, "Number of processes; 1 uses the tokenizer's own threads. Default: one per core.", minimum=1
    )
    resume: bool = common_option(False, "Continue a killed or interrupted run of the same command.", negative=None)
    overwrite: bool = common_option(False, "Replace an existing pair once the new one is complete.", negative=None)
