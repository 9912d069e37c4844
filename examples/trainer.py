"""A diffusion model in transformers' Trainer: the collator makes the noise, the model computes its family's loss."""

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import dlm_bridge  # noqa: F401  the Auto classes know the families from here on
from dlm_bridge.train.collator import DiffusionCollator

MODEL = "demo-output/llada"
TEXTS = ("Tom was a sailor who lived in town.", "Mia was a baker who lived near the lake.") * 8

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "trainer-output", max_steps=40, learning_rate=1e-3, remove_unused_columns=False, report_to="none"
    ),
    train_dataset=[{"input_ids": tokenizer(text + tokenizer.eos_token)["input_ids"]} for text in TEXTS],
    data_collator=DiffusionCollator.of(model, seed=0),
)
print(f"loss {trainer.train().training_loss:.3f}")
ids = tokenizer("Mia was a", return_tensors="pt").input_ids
output = model.generate(ids, gen_length=16, block_length=16, steps=16)
print(tokenizer.decode(output[0], skip_special_tokens=True))
