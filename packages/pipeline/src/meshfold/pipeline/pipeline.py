"""A model in stages, ready to train.

pipeline = Pipeline(lambda: GPT(config), Mesh({"pipe": 4}), schedule="zb-h1", microbatches=8)
optimizer = torch.optim.AdamW(pipeline.parameters())
loss = pipeline.step(batch)                # the same on every rank; gradients are in .grad
optimizer.step()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshfold.mesh import Mesh, SpecError, broadcast, build_on_meta, materialize, retrace_initialization
from meshfold.mesh.first_values import coordinates_of, origin_of
from meshfold.pipeline.before import Example
from meshfold.pipeline.beside import ALONE, Beside
from meshfold.pipeline.communicate import Program
from meshfold.pipeline.costs import Costs
from meshfold.pipeline.cut import Cut, cut
from meshfold.pipeline.deferred import defer
from meshfold.pipeline.gates import Plan
from meshfold.pipeline.ghosts import agree
from meshfold.pipeline.interpreter import Channels, Interpreter, Peaks
from meshfold.pipeline.measure import measure, rehearse
from meshfold.pipeline.microbatch import Microbatch, rows_of, split
from meshfold.pipeline.outputs import Output, share
from meshfold.pipeline.placeholders import signature
from meshfold.pipeline.programs import Programs, Source
from meshfold.pipeline.stage import Stage, loss_in
from meshfold.pipeline.ties import TiedGradients, pairs


class Pipeline:
    """This rank's stages of a model, and how a batch goes through all of them.

    All ranks of the pipeline axis make one, are given the same batches and call the same methods. Gradients, parameters
    and their names are those of the whole model; each rank has those of its stages.

    Attributes:
        cut: what this rank keeps.
        module: the model with only that in it.
        peaks: what the last step held at most on this rank.
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
        axis: str = "pipe",
        example: Example | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        fill: Callable[[nn.Module], None] | None = None,
        block_costs: Sequence[float] | None = None,
        layers: Sequence[int] | None = None,
        blocks: str | None = None,
        batched_weights: bool = False,
        reduce: Callable[[Sequence[tuple[str, nn.Parameter]]], None] | None = None,
        beside: Beside = ALONE,
    ) -> None:
        """Args:
            model: a module, the same on every rank, or a function that makes one, of which each rank then only allocates
                its own stages. It is cut in place.
            mesh: has the axis of the pipeline.
            schedule: a name, a schedule, or a function of one's own; see :func:`meshfold.pipeline.schedule`.
            microbatches: in a step. By default the smallest multiple of the ranks that divides the batch, or as many as
                there are ranks where none does. A batch of fewer rows has as many as it has rows.
            chunks, waves, costs, memory: for a schedule by name or function, as :func:`meshfold.pipeline.schedule` takes them.
            loss_fn: makes a scalar of (output, micro-batch as it was given) where the model's output has no ``.loss``.
                It is a mean over what counts in the micro-batch.
            weigh: how much a micro-batch counts, where neither labels nor rows tell.
            axis: of the pipeline.
            example: what to call the model with, once, to see what it does before its blocks; by default token ids.
            device: where it runs; by default where its weights are, else the current GPU or the CPU.
            dtype: of the weights of a model that a function makes, or that is on the meta device.
            seed: of its first values.
            fill: gives what is left of a model on the meta device its values and its device, in place of dtype and seed.
            block_costs, layers, blocks: how it is cut, see :func:`meshfold.pipeline.cut.cut` (there: costs).
            batched_weights: let the weight gradients of several micro-batches that are due at once be one product.
            reduce: called with parameters as soon as a step has completed their gradients, in the same order on all
                ranks with the same stages; where gradients over data axes may be summed meanwhile.
            beside: what is to be agreed with other pipelines that share this one's parameters.

        Raises:
            LayoutError: for a model that cannot be cut.
            ScheduleError: for a schedule that cannot be made or run.
            SpecError: for arguments out of range.
        """
        mesh.require(axis, what="the pipeline")
        self.mesh, self.axis = mesh, axis
        self._loss_fn, self._weigh, self._reduce = loss_fn, weigh, reduce
        self._beside = beside
        self._programs = Programs(
            schedule, mesh.size(axis), microbatches, chunks=chunks, waves=waves, costs=costs, memory=memory
        )
        self.home = self._programs.home
        built, tape, seed = _built(model, seed) if fill is None else (model, None, seed)
        if not isinstance(built, nn.Module):
            raise SpecError(f"fill=... goes with a module on the meta device, and model is {model!r}")
        self.device = _device(device, built)
        self.cut: Cut = cut(
            built,
            mesh,
            self.home,
            axis=axis,
            example=example,
            device=self.device,
            costs=block_costs,
            layers=layers,
            blocks=blocks,
        )
        if fill is not None:
            fill(built)
        elif tape is not None:
            materialize(
                built,
                tape,
                seed=seed,
                device=self.device,
                dtype=dtype,
                placement_of=lambda name, tensor: coordinates_of(tensor),
            )
        else:
            built.to(self.device)
        self.module = built
        self._takes_cache = "use_cache" in _arguments(built)
        self._shifted = getattr(built, "loss_type", None) in (None, "ForCausalLM")
        queue = defer(built, batched=batched_weights)
        loss_of = partial(loss_in, loss_fn=loss_fn)
        self._stages = {number: Stage(self.cut, number, queue, loss_of) for number in self.cut.stages}
        self._channels = Channels(mesh, axis)
        self._interpreter = Interpreter(
            stages=self._stages,
            home=self.home,
            channels=self._channels,
            device=self.device,
            together=batched_weights,
            reduce=self._whole if reduce is not None else None,
        )
        self._ties = TiedGradients(
            self.cut.ties, [self.cut.parameter(tie.name) for tie in self.cut.ties], self._channels
        )
        self._plans: dict[object, Plan] = {}
        self._unfinished: set[int] = set()

    # -- a module's surface -----------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank keeps, each tensor once, by its name in the whole model."""
        yield from self.cut.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank keeps."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
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
        """The model's configuration, where it has one."""
        return getattr(self.module, "config", None)

    @property
    def peaks(self) -> Peaks:
        """What the last step held at most on this rank."""
        return self._interpreter.peaks

    def __str__(self) -> str:
        return str(self.cut)

    @property
    def stages(self) -> dict[int, Stage]:
        """This rank's, by number, ascending."""
        return dict(self._stages)

    # -- training ---------------------------------------------------------------------------------------------------

    def step(self, batch: Any, *, scale: float = 1.0) -> Tensor:
        """Forward and backward of a batch; gradients are added to ``.grad`` as ``loss.backward()`` would.

        Args:
            batch: the same on every rank of the axis: token ids ``b s``, a dict of the model's arguments, or a pair
                (inputs, targets) for the ``loss_fn``.
            scale: factor of the gradients: 1/n for n steps of which the mean is wanted.

        Returns:
            The loss, the mean over all that counts in the batch: a float64 scalar, the same on every rank.

        Raises:
            SpecError: for a batch that the model cannot be called with.
        """
        works = self.split(batch)
        return self.run(works, scale=scale)

    def split(self, batch: Any, *, unit: int = 1) -> list[Microbatch]:
        """A batch in micro-batches, on the device; ``unit``: see :func:`meshfold.pipeline.microbatch.split`."""
        rows = rows_of(batch)
        moved = _moved(batch, self.device)
        works = split(
            moved,
            self._programs.count(rows, unit=unit),
            unit=unit,
            own_loss=self._loss_fn is not None,
            shifted=self._shifted,
            weigh=self._weigh,
        )
        if self._takes_cache:
            for work in works:
                work.kwargs.setdefault("use_cache", False)
        return self._beside.filled(works)

    def run(self, works: Sequence[Microbatch], *, scale: float | Tensor = 1.0) -> Tensor:
        """:meth:`step` for micro-batches that are there already; their weights should add up to 1."""
        program = self.program(len(works))
        plans = [self._plan(work) for work in works]
        self._channels.open(pairs(self.cut.ties), self.device)
        ties = self._ties
        self._unfinished = set(self._stages)
        with ties.collecting():
            loss = self._interpreter.run(program, works, plans, scale)
        ties.sum()
        if self._reduce is not None and ties.parameters:
            self._reduce([(tie.name, p) for tie, p in zip(ties.ties, ties.parameters, strict=True)])
        return self._everywhere(loss)

    def measure(self, batch: Any, repeats: int = 3) -> Costs:
        """Seconds of F, B and W of every stage for a micro-batch of this batch, the same on every rank.

        For ``simulate`` and ``schedule="auto"``, and, by :func:`meshfold.pipeline.measure.costs_of_blocks`, for a better
        cut. Nothing is trained. Without communication: how long that takes is for the caller to say.
        """
        return self.measure_work(self.split(batch)[0], repeats)

    def measure_work(self, work: Microbatch, repeats: int = 3) -> Costs:
        """:meth:`measure` for a micro-batch that is there already."""
        return measure(
            self._stages,
            work,
            self._plan(work),
            self.mesh.group(self.axis),
            len(self.home),
            self.device,
            repeats,
        )

    def replan(self, costs: Costs) -> None:
        """Let ``schedule="auto"`` find its order anew, for these costs; stages stay where they are. All ranks must give
        the same."""
        self._programs.replan(costs)

    def rehearse(self, work: Microbatch) -> None:
        """F of this rank's stages on a micro-batch, then B and W from the last one back, on noise; nothing is sent.

        For who watches a rank by itself: hooks see what they see in a step. Gradients come, and are whoever's who takes
        them up.
        """
        rehearse(self._stages, work, self._plan(work), self.device)

    def plan_of(self, work: Microbatch) -> Plan:
        """What travels between stages for a micro-batch of this shape."""
        return self._plan(work)

    def program(self, microbatches: int) -> Program:
        """What a step of so many micro-batches does, on every rank."""
        return self._programs.training(microbatches)

    # -- without gradients ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """The loss of a batch, in eval mode, the same on every rank: a float64 scalar."""
        return self.assess(self.split(batch))

    @torch.no_grad()
    def assess(self, works: Sequence[Microbatch]) -> Tensor:
        """:meth:`evaluate` for micro-batches that are there already."""
        total: Tensor | None = None
        with self._evaluating():
            for work, output in zip(works, self._outputs(works), strict=True):
                if output is not None:
                    loss = loss_in(output, work.given, self._loss_fn)
                    weight = work.weight.to(loss.device)
                    part = torch.where(weight > 0, weight * loss.double(), 0.0)
                    total = part if total is None else total + part
        return self._everywhere(total)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model without gradients; its output on every rank, in one piece.

        A tensor, or an object with the tensors among the output's fields as attributes, ``logits`` for one. So
        ``meshfold.engine.models.generate(pipeline, ids, 20)`` writes text.
        """
        given = _moved((args, kwargs), self.device)
        rows = rows_of(given)
        works = split(
            given, self._programs.count(rows, training=False), own_loss=True, weigh=lambda part: 1.0
        )
        calls = [
            Microbatch(
                args=work.given[0],
                kwargs={**({"use_cache": False} if self._takes_cache else {}), **work.given[1]},
                given=None,
                first_row=work.first_row,
                first_token=work.first_token,
                weight=work.weight,
            )
            for work in works
        ]
        outputs = list(self._outputs(self._beside.filled(calls)))[: len(calls)]
        source = self.home[-1]
        here = outputs if self._channels.index == source else None
        return share(here, self.mesh.group(self.axis), source, self.device)

    def _outputs(self, works: Sequence[Microbatch]) -> Iterator[Any]:
        """Outputs of the model where the last stage is, None elsewhere."""
        plans = [self._plan(work) for work in works]
        program = self._programs.forward(len(works))
        return iter(self._interpreter.evaluate(program, works, plans))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _plan(self, work: Microbatch) -> Plan:
        """What travels for a micro-batch of this shape."""
        if not self._plans:  # dtypes may have been changed since the model was cut
            agree(self.cut.beside, self.mesh.group(self.axis), self.device)
        key = signature(work.args, work.kwargs)
        if key not in self._plans:
            with self._beside.looking():
                self._plans[key] = self.cut.gates.look(
                    lambda: self.module(*work.args, **work.kwargs), self.cut.loose()
                )
        return self._plans[key]

    def _everywhere(self, loss: Tensor | None) -> Tensor:
        """The last stage's scalar on all ranks."""
        here = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss
        return broadcast(here, self.mesh.group(self.axis), self.home[-1])

    def _whole(self, stage: int) -> None:
        """The gradients of a stage are whole: hand on what no other stage of this rank, and no other rank, adds to."""
        if self._reduce is None:
            return
        self._unfinished.discard(stage)
        tied = {tie.name for tie in self.cut.ties}
        done = [
            (name, parameter)
            for name, parameter in self.cut.named_parameters()
            if stage in (stages := self.cut.users[name])
            and not stages & self._unfinished
            and name not in tied
        ]
        if done:
            self._reduce(done)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            yield
        finally:
            for module, was in training.items():
                module.training = was


def _built(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Any, int]:
    """(the model, its tape if it is on the meta device, the seed of its values)"""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise SpecError(f"model={model!r}: an nn.Module, or a function without arguments that makes one")
        return (*build_on_meta(model), seed)
    if not any(p.is_meta for p in model.parameters()):
        return model, None, seed
    origin = origin_of(model)
    return (
        (model, retrace_initialization(model), seed) if origin is None else (model, origin.tape, origin.seed)
    )


def _device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next((p.device for p in model.parameters() if not p.is_meta), None)
    if first is not None:
        return first
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


__all__ = ["Output", "Pipeline"]
