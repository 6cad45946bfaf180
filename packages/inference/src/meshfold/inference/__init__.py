"""Generation: requests that come at any time run together, over a pool of pages of keys and values.

    from meshfold.inference import Generator, Sampling

    generator = Generator(model)                      # a model of ours or transformers', or engine.generator
    found = generator.generate(prompts, n=4, sampling=Sampling(temperature=0.7, max_new_tokens=64))

The flow of a token: :class:`Generator` puts requests into the queue of a scheduler (``schedule.py``), which plans steps over the
existing pages (``pages.py``). A forward (``forward.py``) computes a step's tokens, one per row. The model's attention is routed
(``routing.py``) to a pool of keys and values (``cache.py``). ``sampling.py`` draws the next tokens of all rows at once, and the
scheduler records them. Queue, pages and draws are deterministic, so all ranks that share a model do the same.
"""

from __future__ import annotations

from meshfold.inference.generator import Generator, Piece, Rollouts
from meshfold.inference.memory import Memory
from meshfold.inference.pages import OutOfPages, Pages
from meshfold.inference.requests import Request
from meshfold.inference.sampling import Sampling
from meshfold.tensor_parallel import Quantized, quantize

__all__ = [
    "Generator",
    "Memory",
    "OutOfPages",
    "Pages",
    "Piece",
    "Quantized",
    "Request",
    "Rollouts",
    "Sampling",
    "quantize",
]
