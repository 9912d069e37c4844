"""A tiny DiffusionGemma with random weights and a tokenizer of bytes, in tiny-gemma."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokens = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>")  # 256
tokenizer.chat_template = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
text = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_global_key_value_heads": 2,
    "global_head_dim": 32,
    "num_experts": 4,
    "top_k_experts": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "eos_token_id": 256,
    "bos_token_id": None,
}
vision = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
config = DiffusionGemmaConfig(
    text_config=text, vision_config=vision, canvas_length=8, image_token_id=257, boi_token_id=258, eoi_token_id=259
)
model = DiffusionGemmaForBlockDiffusion(config)
model.save_pretrained("tiny-gemma")
tokenizer.save_pretrained("tiny-gemma")
print(f"tiny-gemma: {model.num_parameters():,} random parameters; texts of this model are noise")
