"""A diffusion model in TRL's SFTTrainer, which computes its loss outside of the model: `trl_loss` is the family's.
Prompts are never masked nor counted."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import dlm_bridge  # noqa: F401  the Auto classes know the families from here on
from dlm_bridge.train.collator import DiffusionCollator, trl_loss

MODEL = "demo-output/llada"

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
rows = [{"prompt": f"Tom had {number} apples.", "completion": " He gave Ida one."} for number in range(16)]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig("trl-output", max_steps=40, learning_rate=1e-3, report_to="none", bf16=False),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    data_collator=DiffusionCollator.of(model, for_trl=True),
    compute_loss_func=trl_loss,
)
print(f"loss {trainer.train().training_loss:.3f}")
ids = tokenizer("Tom had 7 apples.", return_tensors="pt").input_ids
output = model.generate(ids, gen_length=16, block_length=16, steps=16)
print(tokenizer.decode(output[0], skip_special_tokens=True))
