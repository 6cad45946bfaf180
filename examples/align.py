"""A tiny model learns on two ranks to write vowels and consonants by turns: GRPO with a reward of five lines.

meshfold run --ranks 2 examples/align.py $(mktemp -d)
"""

import sys
from itertools import pairwise

from matplotlib.figure import Figure

from meshfold.align import GRPO, Prompt, fit
from meshfold.inference import Sampling
from meshfold.models import Llama, LlamaConfig


class Letters:
    """A token a letter; 0 ends a text."""

    end = 0

    def encode(self, text):
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids):
        return "".join(chr(96 + token) for token in ids if token)


def by_turns(prompts, completions, **columns):
    """The share of neighbours of which one is a vowel, of eight letters."""
    texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
    return [sum((a in "aeiou") != (b in "aeiou") for a, b in pairwise(text)) / 8 for text in texts]


letters = Letters()
trainer = GRPO(
    lambda: Llama(LlamaConfig(vocab_size=27, hidden=32, layers=2, heads=2, kv_heads=2)),
    [Prompt(ids=tuple(letters.encode(letter)), given=letter) for letter in "abcdefgh"],
    [by_turns],
    letters,
    parallel=dict(data=2),
    batch_size=8,  # prompts, each with a group of eight completions
    sampling=Sampling(max_new_tokens=8),
    optimizer=dict(name="adamw", lr=2e-2, weight_decay=0.0),
)
metrics = fit(trainer, 30)
found = trainer.rollout.generate([letters.encode("c")], 2, Sampling(max_new_tokens=8, stop_tokens=(0,)))
engine = trainer.engines["policy"]
for step in (0, 9, 19, 29):
    engine.print(f"step {step + 1}: reward {metrics[step]['reward']:.2f}")
engine.print("after c it writes", *map(letters.decode, found.tokens))
if engine.mesh.rank == 0:
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="reward")
    axes.plot([one["reward"] for one in metrics])
    figure.savefig(f"{sys.argv[1]}/reward.png")
trainer.close()
