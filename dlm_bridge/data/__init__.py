"""Training data: blocks of `seq_length` token ids from text, datasets or Megatron pairs, split, shuffled and blended.

`sources` resolves names; `documents` reads and packs text, `indexed` reads and writes Megatron's pairs,
`messages` reads chats, `chat_template` finds their answers, `conversations` makes rows of them; `blocks` splits,
shuffles and blends, `loader` makes batches ahead of time.
"""
