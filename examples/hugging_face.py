"""Fine-tune a Hugging Face model on two ranks, from its folder to a folder that transformers loads.

meshfold run --ranks 2 examples/hugging_face.py $(mktemp -d)
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from meshfold.engine import Engine
from meshfold.huggingface import pretrained
from meshfold.mesh import Mesh, barrier, start

logging.disable_progress_bar()
base, tuned = Path(sys.argv[1]) / "base", Path(sys.argv[1]) / "tuned"

# Any folder with config.json and weights will do. Here rank 0 makes one of a tiny model, and the other waits for it.
process = start()
if process.rank == 0:
    torch.manual_seed(0)
    sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
barrier(Mesh(dict(all=process.world_size)).group("all"), process.device)

# Each rank reads its blocks of the weights alone. parallel={} is one process, and nothing else changes.
adamw = dict(name="adamw", lr=3e-3)
engine = Engine(pretrained(base), parallel=dict(tensor=2), optimizer=adamw, clip_grad_norm=1.0)
held = sum(parameter.numel() for parameter in engine.model.parameters())
engine.print(f"{held:,} of {engine.report.parameters:,} parameters on rank 0")

ids = torch.arange(64).view(2, 32) % 7  # two rows of tokens, to be learnt by heart
for step in range(20):
    loss = engine.train_step(ids)
    if step % 5 == 0:
        engine.print(f"step {step}  loss {loss:.2f}")
engine.save_hugging_face(tuned, like=base)  # all ranks write; tokenizer files would come along
ours = engine.eval_step(ids)

if process.rank == 0:
    model = AutoModelForCausalLM.from_pretrained(tuned).eval()
    with torch.no_grad():
        theirs = model(ids, labels=ids).loss
    print(f"tuned: loss {ours:.2f}, in transformers {theirs:.2f}")
