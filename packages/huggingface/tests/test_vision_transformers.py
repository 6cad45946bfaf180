"""Vision transformers of transformers by rules: also without their head, and with an image's tokens split over ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install meshfold[hf]", allow_module_level=True)

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=28, num_labels=3
)
NAMES = ("ViTForImageClassification", "ViTModel", "DeiTForImageClassification", "Dinov2ForImageClassification")
WITHOUT_TENSOR = ("Dinov2ForImageClassification",)
"""Its scales of layers have parameters that no rule places under tensor parallelism."""


def model_of(name: str, **changes: Any) -> Any:
    """A small model with random weights, none of them zero or one, where a mistake would not show."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{**SIZES, "patch_size": 4, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.3 if parameter.dim() == 1 else 0.03) * torch.randn_like(parameter))
    return model.double()


def batch_of(name: str, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(rows, 3, 28, 28, generator=generator, dtype=torch.float64)
    if name == "ViTModel":
        return dict(pixel_values=pixels, target=torch.randn(rows, 32, generator=generator, dtype=torch.float64))
    return dict(pixel_values=pixels, labels=torch.arange(rows) % 3)


class Distance:
    """Squared distance from ``target`` of the pooled output, plus that of the mean of all tokens."""

    batch_fields = ("target",)

    def __call__(self, output: Any, batch: Any) -> Tensor:
        far = output.pooler_output - batch["target"], output.last_hidden_state.mean(1) - batch["target"]
        return far[0].square().mean() + far[1].square().mean()


def compare(name: str, spec: dict[str, Any], recompute: str | None = None, **changes: Any) -> None:
    serial, batch = model_of(name, **changes), batch_of(name)
    own = Distance() if name == "ViTModel" else None
    given = {key: value for key, value in batch.items() if key != "target"}
    output = serial(**given)
    wanted = output.loss if own is None else own(output, batch)
    wanted.backward()
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", recompute=recompute)
    settings |= dict(loss_fn=own, example=given if "pipeline" in spec else None)
    with Engine(model_of(name, **changes), spec, **settings) as engine:
        loss = engine.train_step(engine.shard_batch(batch))
        found = engine.full_state_dict()
    assert abs(loss - float(wanted.detach())) < 1e-9
    for key, parameter in serial.named_parameters():
        after = parameter.detach() - (0.0 if parameter.grad is None else parameter.grad)
        off = float((found[key] - after).abs().max())
        assert off < 1e-9, f"{key}: off by {off:.2e}"


SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, dict(tensor=2)),
    "1d+sequence": (2, dict(tensor=2, sequence=dict(mode="megatron"))),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "2.5d": (4, dict(tensor=dict(mode="2.5d", size=4, depth=1))),
    "3d": (4, dict(tensor=dict(mode="3d", grid=(1, 2, 2)))),
    "zero 3": (2, dict(data=2, zero=dict(stage=3))),
    "pipeline": (2, dict(pipeline=dict(size=2, microbatches=2))),
    "ring": (2, dict(sequence=dict(mode="ring", size=2))),
    "ulysses": (2, dict(sequence=dict(mode="ulysses", size=2))),
    "ring of 3": (3, dict(sequence=dict(mode="ring", size=3))),
    "both": (4, dict(sequence=dict(mode="ring_ulysses", size=4, ulysses=2))),
    "tensor x ring": (4, dict(tensor=2, sequence=dict(mode="ring", size=2))),
    "2d x ulysses": (4, dict(tensor=dict(mode="2d", grid=(2, 1)), sequence=dict(mode="ulysses", size=2))),
    "data x ulysses, zero 3": (4, dict(data=2, sequence=dict(mode="ulysses", size=2), zero=dict(stage=3))),
}
QUICK = {
    ("ViTForImageClassification", "ring of 3"),
    ("ViTForImageClassification", "ulysses"),
    ("ViTModel", "tensor x ring"),
    ("ViTModel", "2d"),
    ("DeiTForImageClassification", "ring"),
    ("Dinov2ForImageClassification", "data x ulysses, zero 3"),
}


def cases() -> list[Any]:
    return [
        pytest.param(name, how, marks=() if (name, how) in QUICK else pytest.mark.slow)
        for name in NAMES
        for how in SPECS
        if not (name in WITHOUT_TENSOR and "tensor" in SPECS[how][1])
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "how"), cases())
def test_loss_and_every_gradient_are_those_of_one_process(name: str, how: str) -> None:
    """An image has 49 patches and one or two tokens more, which ranks do not divide."""
    size, spec = SPECS[how]
    run_on_ranks(size, compare, name, spec)


def test_197_tokens_and_recomputed_blocks() -> None:
    run_on_ranks(2, compare, "ViTForImageClassification", SPECS["ring"][1], recompute="blocks", patch_size=2)


def refusal(spec: dict[str, Any], changes: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        Engine(model_of("ViTForImageClassification", **changes), spec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(hidden_dropout_prob=0.1), "set the model's dropout to 0"),
        (dict(attention_probs_dropout_prob=0.1), "set the model's attention dropout to 0"),
    ],
)
def test_what_drops_is_refused_under_sequence(changes: dict[str, Any], said: str) -> None:
    assert said in run_on_ranks(2, refusal, SPECS["ring"][1], changes)[0]
