"""Training data: what `--data` names becomes blocks of `seq_length` token ids, split, shuffled and blended.

`sources` resolves names; `documents` reads and packs text, `indexed` reads and writes Megatron's pairs, `conversations`
makes rows of chats; `blocks` splits, shuffles and blends, `loader` makes batches ahead of time.
"""

from dlm_bridge.train.data.blocks import (
    MOCK,
    Blend,
    BlockRange,
    Blocks,
    Epochs,
    MockBlocks,
    Samples,
    blend_schedule,
    split,
)
from dlm_bridge.train.data.conversations import (
    ConversationBlocks,
    ConversationSettings,
    check_sources,
    load_conversation_blocks,
)
from dlm_bridge.train.data.documents import check_tokenizer, find_files, pack
from dlm_bridge.train.data.indexed import (
    IndexedTokens,
    IndexedWriter,
    StreamBlocks,
    TokenLimits,
    check_token_limits,
    open_indexed,
    split_stream,
    token_dtype,
)
from dlm_bridge.train.data.loader import Prefetcher
from dlm_bridge.train.data.sources import DataSources, ReaderSettings, find_data

__all__ = [
    "MOCK",
    "Blend",
    "BlockRange",
    "Blocks",
    "ConversationBlocks",
    "ConversationSettings",
    "DataSources",
    "Epochs",
    "IndexedTokens",
    "IndexedWriter",
    "MockBlocks",
    "Prefetcher",
    "ReaderSettings",
    "Samples",
    "StreamBlocks",
    "TokenLimits",
    "blend_schedule",
    "check_sources",
    "check_token_limits",
    "check_tokenizer",
    "find_data",
    "find_files",
    "load_conversation_blocks",
    "open_indexed",
    "pack",
    "split",
    "split_stream",
    "token_dtype",
]
