"""The models of a trainer under one plan of memory: which of their chunks are on the GPU in each phase of a step.

A trainer that is given ``memory=dict(gpu="80GiB", host="120GiB")`` plans the phases from the sizes of its models, before it
makes any model (:mod:`meshfold.align.phases`). It makes each engine with the placement of the first training phase. Between
phases chunks move, with their optimizer state, by ZeRO's own moves, in an order that keeps both memories within the two ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshfold.align.phases import ModelState, Plan, phases_of, plan_phases
from meshfold.align.records import Preference, Prompt
from meshfold.align.rollout import ROWS_AT_ONCE
from meshfold.align.rows import longest_of
from meshfold.engine import Engine
from meshfold.engine.precision import Precision
from meshfold.engine.zero import regime_of
from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.processes import Environment, running_world
from meshfold.mesh.spec import ZeroSpec, argument_checks, parse_bytes
from meshfold.zero_gemini import Chunk, ChunkPlacement, Move, Shares, in_turn

Model = nn.Module | Callable[[], nn.Module]

MARGIN = 0.03
"""share of the GPU's limit that is left to what no plan counts"""
_LIVE = 34
"""Values of a token and a hidden feature that a block keeps for backward (Korthikanti et al., arXiv 2205.05198, section 4, in
bytes at 2 a value: 34 without attention's scores)."""
_LOGITS = 2**29
"""Bytes of the logits that are there at once; the loss makes them in parts."""
_MOMENTS = {"sgd": 1, "lion": 1}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model.

    Attributes:
        elements: of its parameters.
        trained: those that are trained.
        hidden: features of a token; 0 if unknown.
        layers: blocks; 0 if unknown.
        keys: features of a token's keys, and of its values, in a layer; 0 if unknown.
    """

    elements: int
    trained: int
    hidden: int = 0
    layers: int = 0
    keys: int = 0

    @classmethod
    def of(cls, model: Model) -> ModelSize:
        """Return the sizes of a model; a function that builds one builds it without values."""
        if not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = model()
        config: Any = next((m.config for m in model.modules() if hasattr(m, "config")), None)

        def read(*names: str) -> int:
            return next((int(v) for name in names if (v := getattr(config, name, None)) is not None), 0)

        heads, hidden = read("num_attention_heads", "heads"), read("hidden_size", "hidden")
        wide = read("head_dim", "d") or (hidden // heads if heads else 0)
        parameters = {id(p): p for p in model.parameters()}.values()
        return cls(
            elements=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            hidden=hidden,
            layers=read("num_hidden_layers", "layers"),
            keys=(read("num_key_value_heads", "n_kv_heads") or heads) * wide,
        )


@dataclass(frozen=True, kw_only=True)
class WorkSize:
    """Tokens of the phases.

    Attributes:
        trained: of a forward and backward, on all ranks together.
        scored: of a forward without backward, on all ranks together.
        sampled: of prompts and completions that a data rank samples at a time, all of them under ZeRO stage 3; 0: the policy does
            not sample.
    """

    trained: int
    scored: int
    sampled: int = 0

    @classmethod
    def of_pairs(
        cls, pairs: Sequence[Preference], length: int | None, *, batch_size: int, micro_steps: int
    ) -> WorkSize:
        """Return the tokens of a step on pairs; arguments as of :class:`meshfold.align.DPO`."""
        tokens = 2 * batch_size * longest_of(pairs, length)
        return cls(trained=tokens // micro_steps, scored=tokens)

    @classmethod
    def of_samples(
        cls,
        prompts: Sequence[Prompt],
        *,
        completions: int,
        max_new_tokens: int,
        updates: int,
        micro_steps: int,
        samples: bool = True,
    ) -> WorkSize:
        """Return the tokens of a step on samples, of which there are ``completions``; ``samples``: the policy makes them."""
        longest = max((len(prompt.ids) for prompt in prompts), default=0) + max_new_tokens
        tokens = completions * longest
        sampled = min(completions, ROWS_AT_ONCE) * longest if samples else 0
        return cls(trained=tokens // updates // micro_steps, scored=tokens, sampled=sampled)


class Phases:
    """Plans and enters phases. Without ``memory`` it does nothing: all models stay where their spec puts them.

    Attributes:
        plan: of the phases; None without ``memory``.
        held: by phase, the bytes of model state on the GPU and on the host when it began.
    """

    def __init__(
        self,
        memory: Mapping[str, Any] | None,
        parallel: Mapping[str, object],
        *,
        models: Mapping[str, Model],
        trained: Sequence[str],
        work: WorkSize,
        settings: Mapping[str, Any],
        micro_steps: int = 1,
        made: Mapping[str, Engine] | None = None,
    ) -> None:
        """Args:
            memory: ``gpu`` (bytes, or as in ``"80GiB"``), and if wanted ``host`` (of this rank) and ``activations``; None: no
                phases.
            parallel: the spec of all models.
            models: the policy first.
            trained: names of those with an optimizer.
            work: tokens of the phases.
            settings: of the engines; ``precision``, ``optimizer`` and ``recompute`` are read.
            micro_steps: of an optimizer step.
            made: engines of frozen models that there are already, such as a reward model's.

        Raises:
            SpecError: for another form of ``memory``, or a spec without ZeRO stage 3, whose chunks move.
            MemoryPlanError: if a phase fits nowhere.
        """
        self._parallel, self.plan = parallel, None
        self._engines: dict[str, Engine] = dict(made or {})
        self._now: str | None = None
        self.held: dict[str, tuple[int, int]] = {}
        if memory is None:
            return
        argument_checks.known_keys("memory", memory, memory, dict.fromkeys(("gpu", "host", "activations")))
        if "gpu" not in memory:
            raise SpecError("memory without 'gpu': give the limit of a rank's GPU, as in memory=dict(gpu='80GiB')")
        given = {name: _bytes(name, value) for name, value in memory.items()}
        spec = ParallelSpec.parse(parallel)
        zero = _check_stage(spec)
        self._splits = 1 if spec.tensor is None else spec.tensor.size  # of keys and values
        joined = running_world()  # of ranks that train, where others generate
        ranks = max(Environment.detect().world_size if joined is None else joined.size, spec.world_size)
        self._work, self._trained, self._memory, self._ranks = work, tuple(trained), given, ranks
        sizes = {name: ModelSize.of(model) for name, model in models.items()}
        precision = Precision.parse(settings.get("precision", "fp32"))
        self._recomputes, self._width = settings.get("recompute") is not None, precision.dtype.itemsize
        chosen = settings.get("optimizer")
        name = chosen.get("name", "") if isinstance(chosen, Mapping) else ""
        regime = regime_of(zero, precision, accumulation=micro_steps, ranks=ranks, moments=_MOMENTS.get(str(name), 2))
        self._gradient = regime.gradient
        self._policy = sizes[next(iter(models))]
        states = [
            ModelState(
                name=name,
                parameters=size.elements * regime.parameter / ranks,
                state=size.trained * regime.state / ranks if name in trained else 0.0,
                gradients=size.trained * regime.gradient / ranks if name in trained else 0.0,
            )
            for name, size in sizes.items()
        ]
        for name, engine in self._engines.items():
            _check_stage(engine.spec, f"the engine of {name!r}, which is planned too, has none")
            states.append(self._state_of(name, engine))
        self.plan = self._planned(states)

    def spec(self, name: str) -> Mapping[str, object]:
        """Return the spec of a model's engine, which begins with the placement of the policy's training."""
        if self.plan is None:
            return self._parallel
        first = self.plan[f"train {self._trained[0]}"]
        away = 1.0 - first.parameters[name]
        state = max(away, 1.0 - first.state[name])
        zero = {key: value for key, value in _entries(self._parallel["zero"]).items() if key != "placement"}
        placed = dict(placement="static", offload_param_frac=away, offload_optim_frac=state)
        return {**self._parallel, "zero": {**zero, **placed, "gpu_memory_limit": int(self._memory["gpu"])}}

    def take(self, **engines: Engine) -> None:
        """Take over the placement of engines' chunks, before their first step, and plan again with the sizes of these chunks."""
        if self.plan is None:
            return
        self._engines = {**engines, **self._engines}
        for engine in self._engines.values():
            residency: Any = engine.residency
            residency.hand_over()
        self.plan = self._planned([self._state_of(name, engine) for name, engine in self._engines.items()])

    def enter(self, name: str) -> None:
        """Move chunks to where a phase wants them. All ranks must call, between steps."""
        if self.plan is None or name == self._now:
            return
        phase = self.plan[name]
        moves: list[Move[tuple[str, Chunk, ChunkPlacement]]] = []
        for model, engine in self._engines.items():
            gemini = _gemini(engine)
            away = 1.0 - phase.parameters[model]
            rule = Shares(host_parameters=away, host_optimizer=max(away, 1.0 - phase.state[model]))
            wanted = rule([chunk.shard.numel() for chunk in gemini.chunks])
            for move in gemini.moves_to(dict(zip(gemini.chunks, wanted, strict=True))):
                what = (model, *move.what)
                moves.append(Move(what=what, device_bytes=move.device_bytes, host_bytes=move.host_bytes))
        for move in in_turn(moves):
            model, chunk, placement = move.what
            _gemini(self._engines[model]).move({chunk: placement})
        self._now = name
        self.held[name] = self.bytes_held()

    def bytes_held(self) -> tuple[int, int]:
        """Return the bytes of model state on the GPU and on the host now, on this rank."""
        memories = [_gemini(engine).memory for engine in self._engines.values()]
        return sum(m.compute.used_bytes for m in memories), sum(m.host_arena.used_bytes for m in memories)

    def __str__(self) -> str:
        return "no phases: every model stays where its spec puts it" if self.plan is None else str(self.plan)

    def _planned(self, states: Sequence[ModelState]) -> Plan:
        work, memory, trained = self._work, self._memory, self._trained
        uses = phases_of(
            trained=trained,
            frozen=[state.name for state in states if state.name not in trained],
            rolls_out=work.sampled > 0,
            pages=work.sampled * 2 * self._policy.layers * self._policy.keys * self._width / self._splits,
            activations=memory.get("activations", self._activations(work)),
        )
        return plan_phases(states, uses, gpu=(1 - MARGIN) * memory["gpu"], host=memory.get("host"))

    def _activations(self, work: WorkSize) -> float:
        """Return an estimate of what a forward and backward keep, or a forward alone needs."""
        size, ranks = self._policy, self._ranks
        kept = size.layers + _LIVE if self._recomputes else size.layers * _LIVE
        a_token = size.hidden * self._width
        return max(work.trained / ranks * kept, work.scored / ranks * _LIVE) * a_token + _LOGITS * (a_token > 0)

    def _state_of(self, name: str, engine: Engine) -> ModelState:
        gemini = _gemini(engine)
        each = [gemini.bytes_of(chunk) for chunk in gemini.chunks]
        trained = [c.shard.numel() for c, (_, state) in zip(gemini.chunks, each, strict=True) if state]
        return ModelState(
            name=name,
            parameters=sum(parameters for parameters, _ in each),
            state=sum(state for _, state in each),
            gradients=sum(trained) * self._gradient if name in self._trained else 0.0,
        )


def _check_stage(spec: ParallelSpec, why: str = "") -> ZeroSpec:
    zero = spec.zero
    if zero is None or zero.stage != 3 or zero.placement not in ("auto", "static") or spec.pipeline is not None:
        raise SpecError(
            "memory=... moves chunks of all models between phases: write parallel=dict(..., zero=dict(stage=3)), without a "
            f"placement and without 'pipeline'{why and f'; {why}'}"
        )
    return zero


def _gemini(engine: Engine) -> Any:
    states: Any = engine.states
    return states.gemini


def _entries(zero: object) -> Mapping[str, object]:
    return zero if isinstance(zero, Mapping) else {"stage": zero}


def _bytes(name: str, value: object) -> float:
    try:
        found = float(parse_bytes(value) if isinstance(value, str) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = 0.0
    if not found > 0:
        raise SpecError(f"memory: {name}={value!r} is no number of bytes above 0: write {name}='80GiB', say")
    return found
