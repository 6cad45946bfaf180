"""LoRA as made by peft, under tensor parallelism: ``y = base(x) + B A x · scaling`` (Hu et al. 2021, arXiv 2106.09685).

A model is split as if it had no adapters: they are removed, the rules place its layers, and the adapters are put back around
the sharded layers. The two matrices of an adapter follow from the layouts of its layer; the tensor between them, ``m r``, has
the tokens of the stream and all of its few columns:

======  ========================  ==========================
layer   A ``[r, k]``              B ``[n, r]``
======  ========================  ==========================
column  k as the stream's h       n as of the layer's output
row     k as the layer's input    n as the stream's h
======  ========================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from meshfold.mesh import Layout, LayoutError, Mesh
from meshfold.tensor_parallel.convert.report import Placed, Report
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.modes import Mode
from meshfold.tensor_parallel.plan import MatmulPlan, plan

DropoutOf = Callable[[str, float, int], Dropout]
"""From a name, a probability and the width of a hidden dim (0: the stream) to the sharded dropout."""


def is_adapted(module: nn.Module) -> bool:
    """Return True if a module is a layer with low-rank adapters."""
    return isinstance(getattr(module, "base_layer", None), nn.Module) and _filled(module, "lora_A")


def has_adapters(model: nn.Module) -> bool:
    """Return True if any layer of a model has adapters, of any kind."""
    return any(hasattr(m, "base_layer") or hasattr(m, "modules_to_save") for m in model.modules())


def _filled(module: nn.Module, name: str) -> bool:
    return len(getattr(module, name, ())) > 0


class Adapters:
    """The adapters of a model while they are removed from it.

    Attributes:
        model: the model without adapters, a part of the given one.
    """

    def __init__(self, root: nn.Module, mode: Mode) -> None:
        """Raises:
        LayoutError: for unknown adapters, or a mode in which they cannot be split.
        """
        inner = getattr(root, "get_base_model", None)
        self.model: nn.Module = inner() if callable(inner) else root
        self._off: dict[str, nn.Module] = {}
        self._refuse(root, mode)
        for name, module in list(self.model.named_modules()):
            if is_adapted(module):
                self._off[name] = module

    def _refuse(self, root: nn.Module, mode: Mode) -> None:
        for name, module in root.named_modules():
            where = name or type(root).__name__
            if isinstance(getattr(module, "prompt_encoder", None), nn.Module):
                raise LayoutError(
                    f"{where}: learned prompts cannot be split over a mesh; of peft's adapters only LoRA can"
                )
            if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                raise LayoutError(
                    f"{where}: modules_to_save keeps two copies of a layer, which cannot be split; train adapters alone, or use a "
                    "spec without tensor"
                )
            if not hasattr(module, "base_layer"):
                continue
            if not _filled(module, "lora_A") or _filled(module, "lora_variant"):
                kind = "another form of LoRA (DoRA, ...)" if _filled(module, "lora_A") else type(module).__name__
                raise LayoutError(
                    f"{where}: {kind} cannot be split over a mesh: use plain LoRA on linear layers "
                    "(LoraConfig(target_modules=[...])), or a spec without tensor"
                )
        if mode.layout("residual")["m"] != mode.layout("hidden")["m"]:
            raise LayoutError(
                f"LoRA in mode {mode.name!r}: layers have other tokens there than the stream, and an adapter reads what its "
                "layer reads. Use mode '1d', '2d' or '2.5d'"
            )

    def take_off(self) -> None:
        """Leave the bare layers in the model."""
        for name, module in self._off.items():
            self._put(name, module.base_layer)  # type: ignore[arg-type]

    def put_back(self) -> None:
        """Undo :meth:`take_off`, whatever the layers are now."""
        for name, module in self._off.items():
            module._modules["base_layer"] = self.model.get_submodule(name)
            self._put(name, module)

    def split(self, mesh: Mesh, mode: Mode, dropout: DropoutOf, report: Report) -> None:
        """Split the adapters like their layers, after these; then :meth:`put_back`."""
        for name, module in self._off.items():
            base = self.model.get_submodule(name)
            if not isinstance(base, Linear) or base.role not in ("column", "row"):
                role = getattr(base, "role", type(base).__name__)
                raise LayoutError(
                    f"{name}: an adapter on a {role!r} layer cannot be split, only on 'column' and 'row' layers: "
                    "leave it out of target_modules"
                )
            pairs: Any = module
            for key in list(pairs.lora_A):
                first, second = _plans(mode, base)
                bare: Any = pairs.lora_A[key]
                pairs.lora_A[key] = Linear.convert(bare, mesh, mode, "adapter", matmul=first)
                pairs.lora_B[key] = Linear.convert(
                    pairs.lora_B[key], mesh, mode, "adapter", matmul=second, parts=base.parts
                )
                off = pairs.lora_dropout[key]
                if isinstance(off, nn.Dropout):
                    inner = base.in_features if base.role == "row" else 0
                    made = dropout(f"{name}.lora_dropout.{key}", off.p, inner)
                    pairs.lora_dropout[key] = made.train(off.training)
                for leaf, made_of in (("lora_A", pairs.lora_A[key]), ("lora_B", pairs.lora_B[key])):
                    report.placed.append(
                        Placed(
                            name=f"{name}.{leaf}.{key}",
                            role="adapter",
                            was="Linear",
                            weights=str(made_of.plan.w),
                            shape=(made_of.out_features, made_of.in_features),
                            local=tuple(made_of.weight.shape),
                        )
                    )

    def check(self, roles: dict[str, str]) -> None:
        """Raise a LayoutError for adapters on layers of other roles, before anything is changed."""
        for name in self._off:
            if (role := roles.get(name, "whole")) not in ("column", "row"):
                raise LayoutError(
                    f"{name}: an adapter on a {role!r} layer cannot be split, only on 'column' and 'row' layers: "
                    "leave it out of target_modules"
                )

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        self.model.get_submodule(parent)._modules[leaf] = module


def _plans(mode: Mode, base: Linear) -> tuple[MatmulPlan, MatmulPlan]:
    """Return the matmuls of A and of B."""
    residual, hidden = mode.layout("residual"), mode.layout("hidden")
    tokens = residual["m"]
    reads, writes = (residual["h"], hidden["n"]) if base.role == "column" else (hidden["n"], residual["h"])
    between = Layout({"m": tokens, "n": ()})
    first = plan(Layout({"m": tokens, "k": reads}), Layout({"k": reads, "n": ()}), between)
    second = plan(Layout({"m": tokens, "k": ()}), Layout({"k": (), "n": writes}), Layout({"m": tokens, "n": writes}))
    return first, second
