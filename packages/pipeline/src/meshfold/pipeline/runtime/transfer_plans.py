"""What travels between the stages of a model, for every shape that its micro-batches have."""

from __future__ import annotations

from meshfold.mesh import Mesh
from meshfold.pipeline.runtime.absent_parameters import agree
from meshfold.pipeline.runtime.microbatch import Microbatch
from meshfold.pipeline.runtime.partial_forward import Plan
from meshfold.pipeline.runtime.placeholders import signature
from meshfold.pipeline.runtime.replicas import Beside
from meshfold.pipeline.runtime.side_effects import untouched_buffers
from meshfold.pipeline.runtime.staged_model import Staged


class Plans:
    """Found out when a shape is first seen, by running the model's forward without values."""

    def __init__(self, staged: Staged, mesh: Mesh, axis: str, beside: Beside) -> None:
        """Args:
        staged: the model.
        mesh: where it lies.
        axis: of the pipeline; all its ranks must ask for the first plan.
        beside: the other pipelines.
        """
        self._staged, self._mesh, self._axis, self._beside = staged, mesh, axis, beside
        self._known: dict[object, Plan] = {}

    def of(self, work: Microbatch) -> Plan:
        """For a micro-batch of this shape."""
        cut = self._staged.cut
        if not self._known:  # dtypes may have been changed since the model was cut
            agree(cut.beside, self._mesh.group(self._axis), self._staged.device)
        module = self._staged.module
        key = (module.training, signature(work.args, work.kwargs))
        if key not in self._known:
            with self._beside.looking(), untouched_buffers(module):
                plan = cut.gates.look(lambda: module(*work.args, **work.kwargs), cut.loose())
            plan.check(cut.bounds, cut.blocks.name)
            self._known[key] = plan
        return self._known[key]
