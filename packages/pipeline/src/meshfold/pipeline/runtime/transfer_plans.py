"""What travels between the stages of a model, for every shape that its micro-batches have."""

from __future__ import annotations

from meshfold.mesh import Mesh
from meshfold.pipeline.runtime.absent_parameters import agree_on_dtypes
from meshfold.pipeline.runtime.microbatch import Microbatch
from meshfold.pipeline.runtime.partial_forward import TransferPlan
from meshfold.pipeline.runtime.placeholders import signature
from meshfold.pipeline.runtime.replicas import Replicas
from meshfold.pipeline.runtime.side_effects import preserved_buffers
from meshfold.pipeline.runtime.staged_model import StagedModel


class TransferPlans:
    """Found out when a shape is first seen, by running the model's forward without values."""

    def __init__(self, staged: StagedModel, mesh: Mesh, axis: str, replicas: Replicas) -> None:
        """Args:
        staged: the model.
        mesh: where it lies.
        axis: of the pipeline; all its ranks must ask for the first plan.
        replicas: the other pipelines.
        """
        self._staged, self._mesh, self._axis, self._replicas = staged, mesh, axis, replicas
        self._known: dict[object, TransferPlan] = {}

    def of(self, work: Microbatch) -> TransferPlan:
        """For a micro-batch of this shape."""
        partition = self._staged.partition
        if not self._known:  # dtypes may have been changed since the model was cut
            agree_on_dtypes(partition.outside_blocks, self._mesh.group(self._axis), self._staged.device)
        module = self._staged.module
        key = (module.training, signature(work.args, work.kwargs))
        if key not in self._known:
            with self._replicas.looking(), preserved_buffers(module):
                plan = partition.partial_forward.look(
                    lambda: module(*work.args, **work.kwargs), partition.loose()
                )
            plan.check(partition.bounds, partition.blocks.name)
            self._known[key] = plan
        return self._known[key]
