"""Rollouts on ranks of their own: the first ranks of the job train, the last ones generate, each part under its own spec.

A step, as the two parts tell each other (:mod:`meshfold.align.part_messages`)::

    ranks that train                     ranks that generate
    weights, if it is their turn    ->   take their parts of them
    prompts and settings            ->   generate
    score, train                    <-   completions and log-probabilities
    metrics                         ->   end the step

An error of any rank ends the step of all.

All ranks make the trainer and its steps. A rank that generates has no trainer's engines: its step serves until the metrics come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from meshfold.align.engines import Model
from meshfold.align.part_messages import PartMessages
from meshfold.align.rollout import ROWS_AT_ONCE, EngineRollouts, Rollout
from meshfold.engine import Engine, WeightTransfer
from meshfold.engine.model import SourceValues, WeightSource
from meshfold.engine.world import World, join_world
from meshfold.inference import Rollouts, Sampling
from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.processes import only_ranks
from meshfold.mesh.spec import argument_checks
from meshfold.mesh.watchdog import report_errors

_OF_ENGINE = ("kernels", "seed", "precision", "device", "rules", "watchdog", "check_collectives")
"""Settings of a policy's engine that the engine of the ranks that generate has too."""

Step = Callable[[int], dict[str, float]]


class Parts(Protocol):
    """Protocol of how a trainer's ranks are divided.

    Attributes:
        samples: the ranks that train also generate.
    """

    samples: bool

    def training(self) -> AbstractContextManager[bool]:
        """Context manager around making the engines that train: False on ranks that have none of them."""

    def generator(self, policy: Engine) -> Rollout:
        """Return what samples for a policy's engine, on the ranks that train it."""

    def run(self, step: Step, number: int) -> dict[str, float]:
        """Make a step, or serve in it; return its metrics on every rank."""

    def close(self) -> None:
        """Release what is not the trainer's."""


def parts_of(
    rollout: Callable[[Engine], Rollout] | Mapping[str, Any],
    model: Model,
    parallel: Mapping[str, object] | None,
    settings: Mapping[str, Any],
    *,
    updates: int,
    max_staleness: int,
) -> Parts:
    """Return how a trainer's ranks are divided.

    Args:
        rollout: what makes the generator of the ranks that train; or a dict with ``ranks``, how many generate, and if wanted with
            ``parallel``, their spec, ``every``, the steps from one transfer of weights to the next, and ``rows``, the completions
            that a data coordinate computes at once.
        model: the policy.
        parallel: the spec of the ranks that train.
        settings: of the policy's engine.
        updates: optimizer steps of a step.
        max_staleness: optimizer steps that weights may be behind.

    Raises:
        SpecError: for other keys, numbers out of range, and specs that do not fit the ranks.
    """
    if not isinstance(rollout, Mapping):
        return OnePart(rollout)
    known = dict(ranks=None, parallel=None, every=None, rows=None)
    argument_checks.known_keys("rollout", rollout, rollout, known)
    if "ranks" not in rollout:
        raise SpecError(f"rollout={dict(rollout)!r}: say how many ranks generate, as in rollout=dict(ranks=2)")
    ranks, every, rows = (
        argument_checks.count(f"rollout: {name}", rollout.get(name, default))
        for name, default in (("ranks", 1), ("every", 1), ("rows", ROWS_AT_ONCE))
    )
    behind = (every - 1) * updates
    if behind > max_staleness:
        raise SpecError(
            f"rollout: every={every}: weights get {behind} optimizer steps old, which max_staleness={max_staleness} does not "
            f"allow: write max_staleness={behind}, or every=1"
        )
    world = join_world({}, settings.get("device"))
    size = world.mesh.world_size
    if ranks >= size:
        raise SpecError(
            f"rollout: ranks={ranks} of a job of {size}, which leaves none to train: start more ranks, {ranks} for rollouts and "
            "those of parallel, or let fewer generate"
        )
    train = size - ranks
    _check_spec(f"parallel of the {train} of {size} ranks that train", parallel, train)
    _check_spec(f"rollout: parallel of the {ranks} of {size} ranks that generate", rollout.get("parallel"), ranks)
    return TwoParts(world, train, model, dict(rollout.get("parallel") or {}), settings, every=every, rows=rows)


class OnePart:
    """All ranks train, and generate with the policy's engine."""

    samples = True

    def __init__(self, make: Callable[[Engine], Rollout]) -> None:
        """``make``: makes the generator."""
        self._make = make

    def training(self) -> AbstractContextManager[bool]:
        """See :class:`Parts`."""
        return nullcontext(True)

    def generator(self, policy: Engine) -> Rollout:
        """See :class:`Parts`."""
        return self._make(policy)

    def run(self, step: Step, number: int) -> dict[str, float]:
        """See :class:`Parts`."""
        return step(number)

    def close(self) -> None:
        """See :class:`Parts`."""


class TwoParts:
    """The first ranks train, the others generate; see :func:`parts_of`.

    Attributes:
        generates: this rank is one of those that generate.
        engine: of this rank: of the policy, or of its copy that generates; None before there is one.
        weight_bytes: that this rank sends, or gets, when weights are transferred.
        transfers: of weights, so far.
    """

    samples = False

    def __init__(
        self,
        world: World,
        train: int,
        model: Model,
        parallel: Mapping[str, object],
        settings: Mapping[str, Any],
        *,
        every: int,
        rows: int,
    ) -> None:
        """Args:
        world: all ranks.
        train: how many train.
        model: the policy.
        parallel: the spec of those that generate.
        settings: of the policy's engine.
        every: steps from one transfer of weights to the next.
        rows: completions that a data coordinate computes at once.
        """
        self._world, self._train, self.every = world, train, every
        self._model, self._parallel, self._rows = model, parallel, rows
        self._settings = {name: settings[name] for name in _OF_ENGINE if name in settings}
        self.generates = world.mesh.rank >= train
        self.engine: Engine | None = None
        self._generator: EngineRollouts | None = None
        self._transfer: WeightTransfer | None = None
        self._messages = PartMessages(world, lambda rank: "trains" if rank < train else "generates")
        self.transfers = 0
        self._version = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of a transfer that this rank sends, or gets."""
        return 0 if self._transfer is None else self._transfer.bytes

    @contextmanager
    def training(self) -> Iterator[bool]:
        """See :class:`Parts`; errors of one part are raised on the other too."""
        size = self._world.mesh.world_size
        with self._messages.round():
            with only_ranks(range(self._train, size) if self.generates else range(self._train)):
                if self.generates:
                    self._open()
                yield not self.generates
            self._messages.meet()
        assert self.engine is not None  # made, or told to generator()
        self._transfer = WeightTransfer(self._world, self.engine, sends=not self.generates)

    def generator(self, policy: Engine) -> Rollout:
        """See :class:`Parts`."""
        self.engine = policy
        return RolloutsOfOthers(self)

    @report_errors  # to ranks that are in a collective
    def run(self, step: Step, number: int) -> dict[str, float]:
        """See :class:`Parts`.

        Raises:
            SpecError: if the other part refuses something, with its words.
            CollectiveError: if one of its ranks fails, with the traceback.
        """
        with self._messages.round():
            if self.generates:
                return self._serve()
            metrics = step(number)
            self.tell("metrics", metrics)
        return metrics

    def close(self) -> None:
        """See :class:`Parts`."""
        if self.generates and self.engine is not None:
            self.engine.close()
        self._world.mesh.close()

    # -- on ranks that train ----------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send the policy's weights to the ranks that generate."""
        assert self.engine is not None and self._transfer is not None
        self.tell("weights", self.engine.steps)
        self._transfer.run()
        self.transfers += 1

    def ask(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Rollouts:
        """Have completions generated."""
        self.tell("generate", [[list(prompt) for prompt in prompts], n, vars(sampling)])
        return Rollouts(*self._messages.broadcast(None, self._train))

    def tell(self, kind: str, content: Any = None) -> None:
        """Give an order to the ranks that generate; all that train must call."""
        self._messages.broadcast([kind, content], 0)

    # -- on ranks that generate -------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Make the engine, and see that it generates at all."""
        self.engine = Engine(_frozen(self._model), self._parallel, **self._settings)
        EngineRollouts(self.engine).generate([[0]], 1, Sampling(max_new_tokens=1, temperature=0.0))

    def _serve(self) -> dict[str, float]:
        """Follow orders until a step has ended; return its metrics."""
        assert self.engine is not None and self._transfer is not None
        if self._generator is None:
            self._generator = EngineRollouts(self.engine, rows=self._rows, keeps=True)
        generator = self._generator
        while True:
            kind, content = self._messages.broadcast(None, 0)
            if kind == "weights":
                self._transfer.run()
                self._version = content
                self.transfers += 1
            elif kind == "generate":
                prompts, n, settings = content
                found = generator.generate(prompts, n, Sampling(**settings))
                self._messages.broadcast([found.tokens, found.logprobs, self._version], self._train)
            else:
                metrics: dict[str, float] = content
                return metrics


class RolloutsOfOthers:
    """Samples with the ranks that only generate.

    Attributes:
        exact: they have the policy's weights of every step.
    """

    def __init__(self, parts: TwoParts) -> None:
        """``parts``: of the ranks."""
        self.exact = parts.every == 1
        self._parts, self._calls = parts, 0

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Rollouts:
        """Return ``n`` completions of each prompt; see :class:`meshfold.align.Rollout`."""
        if self._calls % self._parts.every == 0:
            self._parts.send()
        self._calls += 1
        return self._parts.ask(prompts, n, sampling)


def _check_spec(what: str, parallel: Mapping[str, object] | None, ranks: int) -> None:
    try:
        ParallelSpec.parse(parallel or {}, ranks).with_world_size(ranks)
    except SpecError as error:
        raise SpecError(f"{what}: {error}") from None


def _frozen(model: Model) -> Model:
    """Return a model none of whose parameters are trained, so that an engine keeps no master weights of them."""
    if isinstance(model, nn.Module):
        return model.requires_grad_(False)
    return _FrozenSource(model) if isinstance(model, WeightSource) else lambda: model().requires_grad_(False)


class _FrozenSource(WeightSource):
    """A folder's model with frozen parameters."""

    def __init__(self, source: WeightSource) -> None:
        self._source, self.folder = source, source.folder

    def __call__(self) -> nn.Module:
        return self._source().requires_grad_(False)

    def check(self, spec: ParallelSpec) -> None:
        self._source.check(spec)

    def verify(self, part: int, parts: int) -> None:
        self._source.verify(part, parts)

    def weights(self, model: nn.Module) -> SourceValues:
        return self._source.weights(model)
