"""Training data: what `--data` names becomes blocks of `seq_length` token ids, split, shuffled and blended.

`sources` finds and opens what is named; `documents` reads text, which `packing` tokenises, and `indexed` Megatron's
pairs, which `stream` cuts; `chat` reads conversations, which `answers` makes rows of; `blocks` splits and shuffles,
`blend` mixes, `loader` makes batches ahead of time.
"""

from dlm_bridge.train.data.answers import AnswerBlocks, Answers, check_sources, load_answers
from dlm_bridge.train.data.blend import Blend, schedule
from dlm_bridge.train.data.blocks import MOCK, Blocks, Epochs, MockBlocks, Samples, Section, split
from dlm_bridge.train.data.documents import find_files
from dlm_bridge.train.data.indexed import IndexedTokens, IndexedWriter, open_indexed, token_dtype
from dlm_bridge.train.data.loader import Prefetcher
from dlm_bridge.train.data.packing import check_tokenizer, pack
from dlm_bridge.train.data.sources import Data, Reader, find_data
from dlm_bridge.train.data.stream import Fit, StreamBlocks, check_fit, split_stream

__all__ = [
    "MOCK",
    "AnswerBlocks",
    "Answers",
    "Blend",
    "Blocks",
    "Data",
    "Epochs",
    "Fit",
    "IndexedTokens",
    "IndexedWriter",
    "MockBlocks",
    "Prefetcher",
    "Reader",
    "Samples",
    "Section",
    "StreamBlocks",
    "check_fit",
    "check_sources",
    "check_tokenizer",
    "find_data",
    "find_files",
    "load_answers",
    "open_indexed",
    "pack",
    "schedule",
    "split",
    "split_stream",
    "token_dtype",
]
