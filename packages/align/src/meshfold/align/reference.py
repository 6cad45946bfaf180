"""References: a frozen policy whose log-probabilities training is held to, without optimizer state and gradients.

It is either a copy of the policy as it was at the beginning, in an engine without an optimizer, or the policy itself with its
adapters switched off. The latter takes no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from meshfold.align.engines import Model, start_from
from meshfold.align.log_probs import TokenValues
from meshfold.align.objective import GlobalBatch, Objective, Terms
from meshfold.align.rows import model_inputs
from meshfold.engine import Engine
from meshfold.mesh import SpecError

_SCORING = ("kernels", "compile", "seed", "precision", "device", "rules")
"""Settings of a policy's engine that its copy has too: equal weights then have equal log-probabilities."""


class Reference(Protocol):
    """Protocol of a frozen policy.

    Attributes:
        engines: its own, by name.
    """

    engines: dict[str, Engine]

    def score(self, batch: GlobalBatch) -> TokenValues:
        """Return its log-probabilities of a global batch, ``b s``, the same on every rank; all ranks must call."""

    def close(self) -> None:
        """Release the reference model."""


def _no_terms(values: TokenValues, batch: Mapping[str, Any]) -> Terms:
    return Terms(loss=())


class FrozenCopy:
    """A model that is only scored: an engine without an optimizer, whose parameters take no gradient."""

    def __init__(
        self, model: Model, parallel: Any, *, start: str | None = None, temperature: float = 1.0, **settings: Any
    ) -> None:
        """Args:
        model: as of :class:`meshfold.engine.Engine`.
        parallel: the spec.
        start: a checkpoint whose weights it gets; None: those of ``model``.
        temperature: divides the logits.
        settings: further ones of the engine, such as ``precision`` and ``seed``.
        """
        self.objective = Objective(_no_terms, temperature=temperature)
        self.engine = Engine(model, parallel, loss_fn=self.objective, **settings)
        self.engines = dict(reference=self.engine)
        start_from(self.engine, start)
        for parameter in self.engine.model.parameters():
            parameter.requires_grad_(False)
        self.objective.attach(self.engine)

    def score(self, batch: GlobalBatch) -> TokenValues:
        """Return its log-probabilities of a global batch, ``b s``; all ranks must call."""
        return self.objective.score(model_inputs(batch))

    def close(self) -> None:
        """Release its engine."""
        self.objective.close()
        self.engine.close()


class AdapterReference:
    """A policy without its adapters: the base model is the reference, and there is no second one."""

    def __init__(self, objective: Objective, engine: Engine) -> None:
        """Args:
            objective: of the policy.
            engine: of the policy.

        Raises:
            SpecError: if the model has no adapters.
        """
        self._objective, self._model = objective, engine.model
        self.engines: dict[str, Engine] = {}
        if not list(_adapters(self._model)):
            raise SpecError(
                "reference='adapter' for a model without adapters: give pretrained(folder, adapter=LoraConfig(...)), or "
                "reference='copy'"
            )

    def score(self, batch: GlobalBatch) -> TokenValues:
        """Return the base model's log-probabilities of a global batch, ``b s``; all ranks must call."""
        with _without_adapters(self._model):
            return self._objective.score(batch)

    def close(self) -> None:
        """Do nothing: the policy is somebody else's."""


def make_reference(
    kind: str | None,
    objective: Objective,
    engine: Engine,
    model: Model,
    parallel: Any,
    *,
    start: str | None,
    temperature: float = 1.0,
    settings: Mapping[str, Any],
) -> Reference | None:
    """Return the reference that a trainer asked for.

    Args:
        kind: ``"copy"``, ``"adapter"`` or None.
        objective, engine: the policy's.
        model: a copy is made of it; see :func:`copied`.
        parallel: the spec of the copy.
        start: a checkpoint whose weights the copy gets; None: those of ``model``.
        temperature: divides the copy's logits.
        settings: of the policy's engine; a copy has those that change its log-probabilities.

    Raises:
        SpecError: for another kind.
    """
    if kind is None:
        return None
    if kind == "copy":
        scoring = {name: settings[name] for name in _SCORING if name in settings}
        return FrozenCopy(model, parallel, start=start, temperature=temperature, **scoring)
    if kind == "adapter":
        return AdapterReference(objective, engine)
    raise SpecError(f"reference={kind!r}: use 'copy', 'adapter', or None")


def copied(model: Model) -> Model:
    """Return a copy of a model, before an engine takes it over; a function that builds one builds another."""
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model


def _adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of peft that can be switched off."""
    return (module for module in model.modules() if hasattr(module, "enable_adapters") and hasattr(module, "lora_A"))


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    layers: list[Any] = list(_adapters(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:  # peft changes it
            parameter.requires_grad_(True)
