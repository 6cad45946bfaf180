"""Vision-language models whose batch joins the patches of all images in one tensor: Qwen2-VL."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helper beside this file, on every rank
from hugging_face_families import InFloat64

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install meshfold[hf]", allow_module_level=True)

ROWS, PATCHES = 4, 16
IMAGE, START, END, VIDEO = 99, 98, 97, 96


def model() -> Any:
    import transformers

    rope = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=10000.0)
    text = dict(vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4, temporal_patch_size=1)
    config = transformers.Qwen2VLConfig(
        text_config=dict(**text, num_key_value_heads=2, max_position_embeddings=64, rope_parameters=rope),
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=VIDEO,
    )
    torch.manual_seed(0)
    return transformers.Qwen2VLForConditionalGeneration(config).double()


def batch() -> dict[str, Tensor]:
    """Each row has an image of 4 x 4 patches, which become 4 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (ROWS, 12), generator=generator)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = START, IMAGE, END
    labels = ids.masked_fill(ids >= VIDEO, -100)
    labels[0, 9:] = -100
    pixels = torch.randn(ROWS * PATCHES, 3 * 4 * 4, generator=generator, dtype=torch.float64)
    grid = torch.tensor([[1, 4, 4]]).repeat(ROWS, 1)
    return dict(
        input_ids=ids,
        mm_token_type_ids=(ids == IMAGE).long(),
        pixel_values=pixels,
        image_grid_thw=grid,
        labels=labels,
    )


def compare(spec: dict[str, Any]) -> None:
    made, whole = model(), batch()
    wanted = copy.deepcopy(made)
    with InFloat64(), Engine(made, spec, optimizer=dict(name="sgd", lr=1.0), precision="fp64") as engine:
        output = wanted(**whole).loss
        output.backward()
        with pytest.raises(SpecError, match=r"input_ids 4, .*pixel_values 64.*give each data rank a batch of its own"):
            engine.shard_batch(whole)
        rank, ranks = engine.mesh.index("data"), engine.mesh.size("data")
        loss = engine.train_step({name: value.chunk(ranks)[rank] for name, value in whole.items()})
        assert abs(loss - float(output.detach())) < 1e-9
        found = engine.full_state_dict()
    for name, parameter in wanted.named_parameters():
        grad = 0.0 if parameter.grad is None else parameter.grad
        assert torch.allclose(found[name], parameter.detach() - grad, rtol=1e-9, atol=1e-9), name


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [dict(data=2), dict(data=2, zero=dict(stage=3))], ids=["data", "zero 3"])
def test_each_rank_gives_its_own_images(spec: dict[str, Any]) -> None:
    """A global batch cannot be divided, and says so before anything is computed."""
    run_on_ranks(2, compare, spec)
