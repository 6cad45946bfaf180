"""LoRA on a Hugging Face model split over two ranks: only adapters are trained, and saved for peft.

meshfold run --ranks 2 examples/lora.py $(mktemp -d)
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from meshfold.engine import Engine
from meshfold.huggingface import pretrained, save_adapter
from meshfold.mesh import Mesh, barrier, start

logging.disable_progress_bar()
base, adapter = Path(sys.argv[1]) / "base", Path(sys.argv[1]) / "adapter"

# Any folder with config.json and weights will do. Here rank 0 makes one of a tiny model, and the other waits for it.
process = start()
if process.rank == 0:
    torch.manual_seed(0)
    sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
barrier(Mesh(dict(all=process.world_size)).group("all"), process.device)

lora = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
adamw = dict(name="adamw", lr=2e-2)
engine = Engine(pretrained(base, adapter=lora), parallel=dict(tensor=2), optimizer=adamw)
parameters = list(engine.model.parameters())
trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
engine.print(f"rank 0 trains {trained:,} of its {sum(p.numel() for p in parameters):,} parameters")

ids = torch.arange(64).view(2, 32) % 7  # two rows of tokens, to be learnt by heart
for step in range(20):
    loss = engine.train_step(ids)
    if step % 5 == 0:
        engine.print(f"step {step}  loss {loss:.2f}")
save_adapter(engine, adapter)  # all ranks call
ours = engine.eval_step(ids)

if process.rank == 0:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        theirs = model.merge_and_unload().eval()(ids, labels=ids).loss
    print(f"tuned: loss {ours:.2f}, merged by peft {theirs:.2f}")
