"""Engines of a trainer's policy and of its reference, placed by the phases of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshfold.align.engines import Model, trained_engine
from meshfold.align.objective import Objective
from meshfold.align.reference import Reference, copied, make_reference
from meshfold.align.residency import Phases, WorkSize
from meshfold.engine import Engine
from meshfold.mesh import SpecError


class PolicyEngines:
    """Maker of a policy's engine, at once, and of its reference, later.

    Attributes:
        settings: of the engines, with their defaults.
        phases: of a step, for all models.
        policy: the engine that trains the policy.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        parallel: Mapping[str, object] | None,
        *,
        reference: str | None,
        work: WorkSize,
        memory: Mapping[str, Any] | None,
        micro_steps: int,
        start: str | None,
        seed: int,
        settings: Mapping[str, Any],
        critic: Model | None = None,
        made: Mapping[str, Engine] | None = None,
    ) -> None:
        """Args:
            model: the policy.
            objective: in place of its loss.
            parallel: the spec of all models.
            reference: ``"copy"``, ``"adapter"`` or None.
            work: tokens of the phases.
            memory: limits of a plan of phases, see :class:`meshfold.align.Phases`.
            micro_steps: of an optimizer step.
            start: a checkpoint to take the policy's weights from; None: those of ``model``.
            seed: of the engines.
            settings: further ones of the engines.
            critic: is trained too, by an engine that the caller makes.
            made: engines of frozen models that there are already.

        Raises:
            SpecError: for a setting out of range, a policy with dropout, or engines that there are already, on other ranks.
        """
        self.settings: dict[str, Any] = {"kernels": dict(loss=True), "seed": seed, **settings}
        self._objective, self._parallel, self._kind, self._start = objective, parallel or {}, reference, start
        self._frozen = copied(model)
        models = {"policy": model}
        if critic is not None:
            models["critic"] = critic
        trained = tuple(models)
        if reference == "copy":
            models["reference"] = self._frozen
        self.phases = Phases(
            memory,
            self._parallel,
            models=models,
            trained=trained,
            work=work,
            settings=self.settings,
            micro_steps=micro_steps,
            made=made,
        )
        self.policy = trained_engine(
            objective,
            model,
            self.phases.spec("policy"),
            micro_steps=micro_steps,
            start=start,
            dropout=False,
            **self.settings,
        )
        for name, engine in (made or {}).items():
            if engine.mesh.world_size != self.policy.mesh.world_size:
                raise SpecError(
                    f"the {name} model is on {engine.mesh.world_size} ranks, and the policy is trained on "
                    f"{self.policy.mesh.world_size}, since others only generate: make it inside "
                    f"'with only_ranks(range({self.policy.mesh.world_size})):' of meshfold.mesh.processes, on these alone"
                )

    def reference(self, temperature: float = 1.0) -> Reference | None:
        """Make the reference; None if there is none.

        Args:
            temperature: divides the logits of a copy.

        Raises:
            SpecError: for another kind, or adapters that the policy does not have.
        """
        return make_reference(
            self._kind,
            self._objective,
            self.policy,
            self._frozen,
            self.phases.spec("reference") if self._kind == "copy" else self._parallel,
            start=self._start,
            temperature=temperature,
            settings=self.settings,
        )
