"""Training data: blocks of `seq_length` token ids from the sources of `--data`, split, shuffled and blended.

`sources` resolves names; `documents` reads and packs text, `indexed` reads and writes Megatron's pairs,
`conversations` makes rows of chats; `blocks` splits, shuffles and blends, `loader` makes batches ahead of time.
"""
