"""A model in stages, ready to train.

pipeline = Pipeline(lambda: GPT(config), Mesh({"pipe": 4}), schedule="zb-h1", microbatches=8)
optimizer = torch.optim.AdamW(pipeline.parameters())
loss = pipeline.step(batch)                # the same on every rank; gradients are in .grad
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.kernels.fuse import DeferredLogits
from meshfold.mesh import Mesh, broadcast, with_old_names
from meshfold.mesh.model_io import eval_mode
from meshfold.pipeline.runtime.carried import Carried
from meshfold.pipeline.runtime.executor import Channels, Executor, Peaks
from meshfold.pipeline.runtime.gradients import CompleteGradients, TiedGradients, pairs
from meshfold.pipeline.runtime.microbatch import NO_REPLICAS, Batches, Microbatch, Replicas
from meshfold.pipeline.runtime.outputs import Output, share
from meshfold.pipeline.runtime.partition import PartitionConfig
from meshfold.pipeline.runtime.profile import measure, rehearse
from meshfold.pipeline.runtime.side_effects import preserved_buffers
from meshfold.pipeline.runtime.stage import Stage, TransferPlans, loss_in, stage_model
from meshfold.pipeline.runtime.transfer_plan import TransferPlan
from meshfold.pipeline.scheduling.build import Programs, Source
from meshfold.pipeline.scheduling.communication import Program
from meshfold.pipeline.scheduling.costs import Costs


@with_old_names({"cut": "partition", "home": "stage_ranks"})
class Pipeline:
    """A model in stages: this rank's part, and the steps that run a batch through all stages.

    All ranks of the pipeline axis construct one, pass the same batches and call the same methods. Gradients, parameters
    and their names are those of the whole model; each rank has those of its stages.

    Attributes:
        partition: what this rank keeps.
        module: the model with only that in it.
        peaks: the most that the last step held on this rank.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        mesh: Mesh,
        *,
        schedule: Source = "1f1b",
        microbatches: int | None = None,
        chunks: int | None = None,
        waves: int | None = None,
        costs: Costs | Mapping[int, Costs] | None = None,
        memory: float | Sequence[float] | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        weigh: Callable[[Any], Tensor | float] | None = None,
        partition: PartitionConfig | None = None,
        batched_weights: bool = False,
        reduce: Callable[[Sequence[tuple[str, nn.Parameter]]], None] | None = None,
        replicas: Replicas = NO_REPLICAS,
        **options: Any,
    ) -> None:
        """Args:
            model: a module, the same on every rank, or a function that makes one; each rank then allocates only its
                own stages. It is cut in place.
            mesh: has the axis of the pipeline.
            schedule: a name, a schedule, or a custom function; see :func:`meshfold.pipeline.schedule`.
            microbatches: in a step. By default the smallest multiple of the ranks that divides the batch, or the number of ranks if
                no multiple does. A batch of fewer rows has one per row.
            chunks, waves, costs, memory: for a schedule by name or function, as :func:`meshfold.pipeline.schedule` takes them.
            loss_fn: returns a scalar for (output, micro-batch as it was given): a mean over the targets of the micro-batch;
                None: the model's own, its output's ``.loss``.
            weigh: weight of a micro-batch, if neither labels nor rows determine it.
            partition: how the model is cut, where its stages run, and their first values.
            batched_weights: compute the weight gradients of several micro-batches that are due at once in one product.
            reduce: called with parameters as soon as a step has completed their gradients, in the same order on all ranks with the
                same stages. It may sum gradients over data axes.
            replicas: agreements with other pipelines that share this one's parameters.
            options: fields of :class:`PartitionConfig`, such as ``layers=[2, 6]``: they replace those of ``partition``.

        Raises:
            LayoutError: for a model that cannot be cut.
            ScheduleError: for a schedule that cannot be made or run.
            SpecError: for arguments out of range.
        """
        config = replace(partition or PartitionConfig(), **options)
        axis = config.axis
        mesh.require(axis, what="the pipeline")
        self.mesh, self.axis = mesh, axis
        self._loss_fn, self._replicas = loss_fn, replicas
        self._programs = Programs(
            schedule, mesh.size(axis), microbatches, chunks=chunks, waves=waves, costs=costs, memory=memory
        )
        self.stage_ranks = self._programs.stage_ranks
        staged = stage_model(model, mesh, self.stage_ranks, config, batched_weights=batched_weights, loss_fn=loss_fn)
        self.partition, self.module, self.device = staged.partition, staged.module, staged.device
        self._stages = staged.stages
        self._batches = Batches(self.module, self._programs, self.device, own_loss=loss_fn is not None, weigh=weigh)
        self._plans = TransferPlans(staged, mesh, axis, replicas)
        self._channels = Channels(mesh, axis)
        self._ties = TiedGradients(
            self.partition.ties,
            [self.partition.parameter(tie.name) for tie in self.partition.ties],
            self._channels,
        )
        self._whole = None if reduce is None else CompleteGradients(self.partition, self._ties, reduce)
        self._executor = Executor(
            stages=self._stages,
            stage_ranks=self.stage_ranks,
            channels=self._channels,
            device=self.device,
            together=batched_weights,
            reduce=None if self._whole is None else self._whole.of_stage,
        )

    # -- a module's surface -----------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, each tensor once, by its name in the whole model."""
        yield from self.partition.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over this rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def training(self) -> bool:
        """True in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Pipeline:
        """Switch dropout on."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Switch dropout off."""
        return self.train(False)

    @property
    def config(self) -> Any:
        """The model's configuration, if it has one."""
        return getattr(self.module, "config", None)

    @property
    def peaks(self) -> Peaks:
        """Peaks of the last step on this rank."""
        return self._executor.peaks

    def __str__(self) -> str:
        return str(self.partition)

    @property
    def stages(self) -> dict[int, Stage]:
        """This rank's stages, by number, ascending."""
        return dict(self._stages)

    def defer_logits(self, logits: DeferredLogits) -> None:
        """Compute the loss without whole logits in the last stage; ``logits``: of ``module``."""
        for stage in self._stages.values():
            stage.logits = logits

    def carry(self, carried: Carried) -> None:
        """Send numbers of the blocks from stage to stage along with the stream, for the last to read. All ranks must call."""
        for stage in self._stages.values():
            stage.carried = carried

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._ties.close()

    # -- training ---------------------------------------------------------------------------------------------------

    def step(self, batch: Any, *, scale: float = 1.0) -> Tensor:
        """Run forward and backward of a batch; gradients are added to ``.grad`` as ``loss.backward()`` would.

        Args:
            batch: the same on every rank of the axis: token ids ``b s``, a dict of the model's arguments, or a pair
                (inputs, targets) for the ``loss_fn``.
            scale: factor of the gradients: 1/n for the mean over n steps.

        Returns:
            The loss, the mean over all that counts in the batch: a float64 scalar, the same on every rank.

        Raises:
            SpecError: for a batch that the model cannot be called with.
        """
        works = self.split(batch)
        return self.run(works, scale=scale)

    def split(self, batch: Any, *, unit: int = 1) -> list[Microbatch]:
        """Cut a batch into micro-batches on the device; ``unit``: see :func:`meshfold.pipeline.runtime.microbatch.split`."""
        return self._replicas.filled(self._batches.to_train(batch, unit=unit))

    def run(self, works: Sequence[Microbatch], *, scale: float | Tensor = 1.0) -> Tensor:
        """Run :meth:`step` on existing micro-batches; their weights should add up to 1."""
        program = self.program(len(works))
        plans = [self._plans.of(work) for work in works]
        self._channels.open(pairs(self.partition.ties), self.device)
        if self._whole is not None:
            self._whole.begin()
        with self._ties.collecting():
            loss = self._executor.run(program, works, plans, scale)
        self._ties.sum()
        if self._whole is not None:
            self._whole.of_ties()
        return self._everywhere(loss)

    def measure(self, batch: Any, repeats: int = 3) -> Costs:
        """Measure the seconds of F, B and W of every stage for a micro-batch of this batch; the same on every rank.

        For ``simulate`` and ``schedule="auto"``. Nothing is trained. Communication is not measured: pass its
        time separately.
        """
        return self.measure_work(self.split(batch)[0], repeats)

    def measure_work(self, work: Microbatch, repeats: int = 3) -> Costs:
        """Run :meth:`measure` on an existing micro-batch."""
        plan, group = self._plans.of(work), self.mesh.group(self.axis)
        with preserved_buffers(self.module):
            return measure(self._stages, work, plan, group, len(self.stage_ranks), self.device, repeats)

    def replan(self, costs: Costs) -> None:
        """Let ``schedule="auto"`` search again, for these costs; stages stay on their ranks. All ranks must pass
        the same."""
        self._programs.replan(costs)

    def rehearse(self, work: Microbatch) -> None:
        """Run F of this rank's stages on a micro-batch, then B and W from the last one back, on noise; send nothing.

        For profiling a single rank: hooks see the same calls as in a step. The gradients are computed, and left to the caller.
        """
        plan = self._plans.of(work)
        with preserved_buffers(self.module):
            rehearse(self._stages, work, plan, self.device)

    def plan_of(self, work: Microbatch) -> TransferPlan:
        """Return what travels between stages for a micro-batch of this shape."""
        return self._plans.of(work)

    def program(self, microbatches: int) -> Program:
        """Return the program of a step with ``microbatches`` micro-batches, for all ranks."""
        return self._programs.training(microbatches)

    # -- without gradients ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """Return the loss of a batch in eval mode: a float64 scalar, the same on every rank."""
        return self.assess(self.split(batch))

    @torch.no_grad()
    def assess(self, works: Sequence[Microbatch]) -> Tensor:
        """Run :meth:`evaluate` on existing micro-batches."""
        total: Tensor | None = None
        with eval_mode(self.module), ExitStack() as opened:
            for work in works:
                self._plans.of(work)  # before logits are deferred: planning runs a whole forward
            last = self._stages.get(len(self.stage_ranks) - 1)
            if last is not None and last.logits is not None:
                opened.enter_context(last.logits.waiting())
            for work, output in zip(works, self._outputs(works), strict=True):
                if output is not None:
                    loss = loss_in(output, work.given, self._loss_fn)
                    weight = work.weight.to(loss.device)
                    part = torch.where(weight > 0, weight * loss.double(), 0.0)
                    total = part if total is None else total + part
        return self._everywhere(total)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model without gradients; return its whole output on every rank.

        The output is a tensor, or an object with the tensors among the output's fields as attributes, such as ``logits``. So
        ``meshfold.models.generate(pipeline, ids, 20)`` writes text.
        """
        return self._call(self._batches.to_call(args, kwargs))

    @torch.no_grad()
    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as ``pipeline(...)`` does, with the batch in one piece: its layers find all rows at once."""
        return self._call(self._batches.to_call(args, kwargs, count=1))

    @torch.no_grad()
    def forward_alone(self, *args: Any, **kwargs: Any) -> None:
        """Run this rank's stages on random inputs in the shape of such a call; stages exchange no activations.

        For code that watches how layers are called. All ranks of the pipeline must call.
        """
        [work] = self._batches.to_call(args, kwargs, count=1)
        plan = self._plans.of(work)
        with preserved_buffers(self.module):
            for stage in self._stages.values():
                stage.run(work, plan, stage.random_inputs(plan, self.device))

    @property
    def looks(self) -> bool:
        """True while layers run on placeholders, to find out what stages exchange: they must keep nothing of what they see."""
        return self._plans.looks

    def _call(self, calls: list[Microbatch]) -> Any:
        outputs = list(self._outputs(self._replicas.filled(calls)))[: len(calls)]
        source = self.stage_ranks[-1]
        here = outputs if self._channels.index == source else None
        return share(here, self.mesh.group(self.axis), source, self.device)

    def _outputs(self, works: Sequence[Microbatch]) -> Iterator[Any]:
        """Yield the model's outputs on the rank of the last stage, None elsewhere."""
        plans = [self._plans.of(work) for work in works]
        program = self._programs.forward(len(works))
        return iter(self._executor.evaluate(program, works, plans))

    def _everywhere(self, loss: Tensor | None) -> Tensor:
        """Broadcast the last stage's scalar to all ranks."""
        here = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss
        return broadcast(here, self.mesh.group(self.axis), self.stage_ranks[-1])


__all__ = ["Output", "Pipeline"]
