"""GaLore: moments of gradients that are projected to a few dims (Zhao et al. 2024, arXiv 2403.03507)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshfold.optimizers.adafactor import adafactor_updates, check_factors
from meshfold.optimizers.base import RoleOptimizer, gradient_of
from meshfold.optimizers.blocks import Product, in_buckets
from meshfold.optimizers.eight_bit import pack, unpack
from meshfold.optimizers.roles import MATRICES
from meshfold.optimizers.settings import OptimizerSettingError, adam_settings, learning_rate, positive


class GaLoreOptimizer(RoleOptimizer):
    """Base of optimizers that keep moments of projected gradients.

    A matrix m × n with m ≥ n keeps the first ``rank`` right singular vectors of a gradient, any other the left ones. They are
    recomputed every ``update_proj_gap`` steps. The component of largest size of each vector is positive: moments continue in
    the new vectors, so a random sign would change steps. Projection and moments are kept flat, whole on every rank that has a
    block. A group's ``role`` says what is projected: ``"matrices"`` of two dims; without a role, all of two dims.

    With ``eight_bit`` the moments of projected gradients are kept in 8 bits (:mod:`meshfold.optimizers.eight_bit`); since they
    are whole, the layout does not change them. Steps are computed in float32 at least, also of parameters in bfloat16.
    """

    def _step(self) -> None:
        for group in self.param_groups:
            for bucket in in_buckets(self._trained(group), self.blocks):
                counts = {p: self._count(p) for p in bucket}
                projected = [p for p in bucket if group["role"] in (None, MATRICES) and p.dim() == 2]
                low = self._renew(group, projected, counts)
                products = [
                    Product(p, gradient_of(p), self._projection(group, p), _dim(self.blocks.shape(p)))
                    for p in projected
                    if p not in low
                ]
                self._step_on(group, bucket, counts, low, products)

    def _step_on(
        self,
        group: dict[str, Any],
        bucket: list[Tensor],
        counts: dict[Tensor, float],
        low: dict[Tensor, Tensor],
        products: list[Product],
    ) -> None:
        """Step some parameters.

        Args:
            group: with the settings.
            bucket: the parameters.
            counts: their step counts.
            low: projected gradients, ``(size of the remaining dim, rank)``, that are known: of new projections.
            products: the other projected gradients, to be summed.
        """
        raise NotImplementedError

    def _renew(
        self, group: dict[str, Any], projected: list[Tensor], counts: dict[Tensor, float]
    ) -> dict[Tensor, Tensor]:
        """Recompute projections that are due, each on the rank that gets the matrix; return the gradients that it projects."""
        stale = [
            p for p in projected if (counts[p] - 1) % group["update_proj_gap"] == 0 or "projection" not in self.state[p]
        ]
        alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        for p in stale:
            alike.setdefault((p.dtype, self._projection_shape(group, p)[1]), []).append(p)
        low: dict[Tensor, Tensor] = {}
        for (_, rank), some in alike.items():
            made = self.blocks.of_whole(
                some,
                [gradient_of(p) for p in some],
                partial(_with_projected, vectors=PROJECTIONS[group["projection"]], rank=rank),
                [(sum(self.blocks.shape(p)), rank) for p in some],
            )
            for p, both in zip(some, made, strict=True):
                size = self._projection_shape(group, p)[0]
                self.state[p]["projection"] = both[:size].reshape(-1).clone()
                low[p] = both[size:]
        return low

    def _projection_shape(self, group: dict[str, Any], parameter: Tensor) -> tuple[int, int]:
        shape = self.blocks.shape(parameter)
        return shape[_dim(shape)], min(group["rank"], *shape)

    def _projection(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        kept: Tensor = self.state[parameter]["projection"]
        return kept.view(self._projection_shape(group, parameter))

    def _back(self, group: dict[str, Any], parameter: Tensor, low: Tensor) -> Tensor:
        """Project an update back and return this rank's block."""
        dim = _dim(self.blocks.shape(parameter))
        projection = self._projection(group, parameter)
        stays = self.blocks.cut(low.to(projection.dtype), parameter, (1 - dim,))
        summed = self.blocks.cut(projection, parameter, (dim,))
        update: Tensor = stays @ summed.mT if dim == 1 else summed @ stays.mT
        return update.mul_(group["scale"])

    def _low_rank(self, group: dict[str, Any], parameter: Tensor, key: str, like: Tensor, *, signed: bool) -> Tensor:
        """Return a moment of a projected gradient, created as zeros in its shape; :meth:`_keep` what becomes of it."""
        state = self.state[parameter]
        if key not in state:
            return torch.zeros_like(like)
        return unpack(state[key], like, signed=signed) if group["eight_bit"] else _wide(state[key]).view(like.shape)

    def _keep(self, group: dict[str, Any], parameter: Tensor, key: str, moment: Tensor, *, signed: bool) -> None:
        """Keep a moment of a projected gradient, in 8 bits if the group says so."""
        state = self.state[parameter]
        if group["eight_bit"]:
            state[key] = pack(moment, signed=signed)
        elif key not in state or state[key].data_ptr() != moment.data_ptr():
            state[key] = moment.reshape(-1)

    def _wide_moment(self, parameter: Tensor, key: str) -> Tensor:
        """Return a moment of the parameter's shape, in float32 at least, created as zeros."""
        state = self.state[parameter]
        state[key] = _wide(
            state[key] if key in state else torch.zeros_like(parameter, dtype=_wide(parameter[:0]).dtype)
        )
        kept: Tensor = state[key]
        return kept


def _wide(values: Tensor) -> Tensor:
    """Return numbers in float32 at least."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def singular_vectors(matrix: Tensor, rank: int) -> Tensor:
    """Return the first singular vectors on the smaller side of a matrix as columns; the largest component of each is positive."""
    left, _, right = torch.linalg.svd(_wide(matrix), full_matrices=False)
    vectors = (right.mT if _dim(tuple(matrix.shape)) == 1 else left)[:, :rank]
    return _with_fixed_signs(vectors).to(matrix.dtype)


def randomized_vectors(matrix: Tensor, rank: int) -> Tensor:
    """Return :func:`singular_vectors` approximately, by products with a random matrix (Halko et al. 2011, arXiv 0909.4061).

    Two iterations from ``rank + 8`` columns that depend only on the size. Some hundred times as fast for large matrices.
    """
    wide = _wide(matrix)
    tall = wide if _dim(tuple(matrix.shape)) == 1 else wide.mT
    columns = min(tall.shape[1], rank + _MORE)
    random = torch.randn(tall.shape[1], columns, dtype=wide.dtype, generator=torch.Generator().manual_seed(0))
    basis = random.to(wide.device)
    for _ in range(2):
        basis = torch.linalg.qr(tall.mT @ (tall @ basis)).Q
    small = tall @ basis
    vectors = basis @ torch.linalg.eigh(small.mT @ small).eigenvectors.flip(-1)[:, :rank]
    return _with_fixed_signs(vectors).to(matrix.dtype)


def _with_projected(matrix: Tensor, *, vectors: Callable[[Tensor, int], Tensor], rank: int) -> Tensor:
    """Return a matrix's projection and, below it, the projected matrix: ``(m + n, rank)``."""
    projection = vectors(matrix, rank)
    return torch.cat([projection, (matrix if _dim(tuple(matrix.shape)) == 1 else matrix.mT) @ projection])


PROJECTIONS = {"svd": singular_vectors, "randomized": randomized_vectors}
_MORE = 8  # columns beyond the rank, for accuracy


def _with_fixed_signs(vectors: Tensor) -> Tensor:
    """Return columns with the largest component of each positive."""
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return vectors * torch.where(largest < 0, -1, 1)


def _dim(shape: tuple[int, ...]) -> int:
    """Return the dim that a projection sums over, the smaller one."""
    return 1 if shape[0] >= shape[1] else 0


def _check(
    name: str, rank: object, update_proj_gap: object, scale: object, projection: object, eight_bit: object
) -> None:
    for key, value, example in (("rank", rank, 128), ("update_proj_gap", update_proj_gap, 200)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptimizerSettingError(f"{name}: {key}={value!r}; give a count of at least 1, such as {key}={example}")
    positive(name, "scale", scale, example="0.25")
    if projection not in PROJECTIONS:
        raise OptimizerSettingError(f"{name}: projection={projection!r}; give {' or '.join(map(repr, PROJECTIONS))}")
    if not isinstance(eight_bit, bool):
        raise OptimizerSettingError(f"{name}: eight_bit={eight_bit!r}; give True or False")


class GaLoreAdamW(GaLoreOptimizer):
    """GaLore on AdamW, as ``galore_torch.GaLoreAdamW`` with ``proj_type="std"``: eps before bias correction, decay last."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        projection: str = "svd",
        eight_bit: bool = False,
        correct_bias: bool = True,
    ) -> None:
        """Args:
        params: parameters, or groups of them as :func:`meshfold.optimizers.role_groups` makes.
        lr: learning rate.
        betas: decay rates of the means of the gradient and of its square.
        eps: added to the root of the mean square.
        weight_decay: of the weights, times the learning rate.
        rank: of projected gradients; a matrix that is smaller keeps all of its own.
        update_proj_gap: steps between two projections.
        scale: of updates that are projected back.
        projection: how singular vectors are found: ``"svd"``, or ``"randomized"``, which is approximate and much faster.
        eight_bit: keep moments of projected gradients in 8 bits.
        correct_bias: divide the means by 1 − beta^t.

        Raises:
            OptimizerSettingError: for a value that is out of range, an unknown role, or matrices that are none.
        """
        adam_settings("GaLoreAdamW", lr, betas, eps, weight_decay)
        _check("GaLoreAdamW", rank, update_proj_gap, scale, projection, eight_bit)
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                rank=rank,
                update_proj_gap=update_proj_gap,
                scale=scale,
                projection=projection,
                eight_bit=eight_bit,
                correct_bias=correct_bias,
                role=None,
            ),
        )

    def _step_on(
        self,
        group: dict[str, Any],
        bucket: list[Tensor],
        counts: dict[Tensor, float],
        low: dict[Tensor, Tensor],
        products: list[Product],
    ) -> None:
        beta1, beta2 = group["betas"]
        low |= zip((one.parameter for one in products), self.blocks.sums(products), strict=True)
        for p in bucket:
            gradient = _wide(low.get(p, gradient_of(p)))
            if p in low:
                mean = self._low_rank(group, p, "low_rank_avg", gradient, signed=True)
                square = self._low_rank(group, p, "low_rank_avg_sq", gradient, signed=False)
            else:
                mean, square = self._wide_moment(p, "exp_avg"), self._wide_moment(p, "exp_avg_sq")
            mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            update = mean / square.sqrt().add_(group["eps"])
            if p in low:
                self._keep(group, p, "low_rank_avg", mean, signed=True)
                self._keep(group, p, "low_rank_avg_sq", square, signed=False)
                update = self._back(group, p, update)
            if group["correct_bias"]:
                update.mul_(math.sqrt(1 - beta2 ** counts[p]) / (1 - beta1 ** counts[p]))
            p.sub_(update.mul_(group["lr"]))
            if group["weight_decay"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])


class GaLoreAdafactor(GaLoreOptimizer):
    """GaLore on transformers' Adafactor with a given rate, as ``galore_torch.GaLoreAdafactor``."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        *,
        scale_parameter: bool = False,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        projection: str = "svd",
        eight_bit: bool = False,
    ) -> None:
        """Args:
        params: parameters, or groups of them as :func:`meshfold.optimizers.role_groups` makes.
        lr: learning rate.
        eps: added to squared gradients, and the least root mean square of a parameter that the rate is scaled by.
        clip_threshold: largest root mean square of an update, of a projected one in its projected form.
        decay_rate: the mean of squares decays by 1 − t^decay_rate; below 0.
        beta1: decay rate of the mean of updates; None: none is kept.
        weight_decay: of the weights, times the rate.
        scale_parameter: scale the rate by the parameter's root mean square.
        rank: of projected gradients; a matrix that is smaller keeps all of its own.
        update_proj_gap: steps between two projections.
        scale: of updates that are projected back.
        projection: how singular vectors are found: ``"svd"``, or ``"randomized"``, which is approximate and much faster.
        eight_bit: keep moments of projected gradients in 8 bits.

        Raises:
            OptimizerSettingError: for a value that is out of range, an unknown role, or matrices that are none.
        """
        name = "GaLoreAdafactor"
        learning_rate(name, lr)
        check_factors(name, eps, clip_threshold, decay_rate, beta1, weight_decay)
        _check(name, rank, update_proj_gap, scale, projection, eight_bit)
        super().__init__(
            params,
            dict(
                lr=lr,
                eps=eps,
                clip_threshold=clip_threshold,
                decay_rate=decay_rate,
                beta1=beta1,
                weight_decay=weight_decay,
                scale_parameter=scale_parameter,
                rank=rank,
                update_proj_gap=update_proj_gap,
                scale=scale,
                projection=projection,
                eight_bit=eight_bit,
                role=None,
            ),
        )

    def _step_on(
        self,
        group: dict[str, Any],
        bucket: list[Tensor],
        counts: dict[Tensor, float],
        low: dict[Tensor, Tensor],
        products: list[Product],
    ) -> None:
        gradients = {p: gradient_of(p) for p in bucket}
        projected = {*low, *(one.parameter for one in products)}
        for p, update, rate in adafactor_updates(
            self, group, counts, gradients, dict.fromkeys(bucket, group["lr"]), low, products
        ):
            if group["beta1"] is not None:
                if p in projected:
                    mean = self._low_rank(group, p, "low_rank_avg", update, signed=True)
                else:
                    [mean] = self._moments([p], "exp_avg")
                update = mean.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
                if p in projected:
                    self._keep(group, p, "low_rank_avg", update, signed=True)
            if p in projected:
                update = self._back(group, p, update)
            if group["weight_decay"]:
                p.mul_(1 - group["weight_decay"] * rate)
            p.sub_(update)
