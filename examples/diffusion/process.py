"""Training of a denoiser: noise and timesteps, targets, weights, and the way back from noise to an image.

Noise and timesteps of a row depend on the seed, the step and the row's number in the global batch, and on nothing else. So every
spec trains on the same ones.

    diffusion (Ho et al. 2020, arXiv 2006.11239):  x_t = a x + s n,  a² + s² = 1
        epsilon: n        v: a n - s x (Salimans and Ho 2022, arXiv 2202.00512)        x0: x
    rectified flow (Liu et al. 2022, arXiv 2209.03003):  x_t = (1 - t) x + t n
        flow: n - x
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshfold.mesh import SpecError
from meshfold.mesh.random import fill_normal_, key_of, uniform

Prediction = Literal["epsilon", "v", "x0", "flow"]
_BETAS = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}
_ROWS = 1 << 31  # of a global batch, at most: the numbers of a row do not depend on how many there are


@dataclass(frozen=True, kw_only=True)
class Process:
    """A noise process and its objective.

    Attributes:
        prediction: what the model's output is.
        schedule: of the noise of a diffusion: "linear" (DiT) or "scaled_linear" (Stable Diffusion); a flow has none.
        logit_normal: draw timesteps by a logit-normal distribution (Esser et al. 2024, arXiv 2403.03206) instead of evenly.
        min_snr: gamma of min-SNR weights (Hang et al. 2023, arXiv 2303.09556); None: all timesteps weigh the same.
        seed: of noise and timesteps.
    """

    prediction: Prediction = "epsilon"
    schedule: str = "linear"
    logit_normal: bool = False
    min_snr: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prediction not in ("epsilon", "v", "x0", "flow"):
            raise SpecError(f"prediction={self.prediction!r}: write 'epsilon', 'v', 'x0' or 'flow'")
        if self.schedule not in _BETAS:
            raise SpecError(f"schedule={self.schedule!r}: write {' or '.join(map(repr, _BETAS))}")
        if self.min_snr is not None and (self.prediction == "flow" or self.min_snr <= 0):
            raise SpecError(
                f"min_snr={self.min_snr!r}: a number above 0, for predictions other than 'flow'; or leave it out"
            )

    def signal_and_noise(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and s of x_t for timesteps from 0 to 999, in float64: ``... -> ..., ...``."""
        if self.prediction == "flow":
            share = times.double() / 1000
            return 1 - share, share
        low, high = _BETAS[self.schedule]
        if self.schedule == "linear":
            betas = torch.linspace(low, high, 1000, dtype=torch.float64)
        else:
            betas = torch.linspace(low**0.5, high**0.5, 1000, dtype=torch.float64) ** 2
        kept = (1 - betas).cumprod(0).to(times.device)[times.long()]
        return kept.sqrt(), (1 - kept).sqrt()

    def draw(self, shape: tuple[int, ...], step: int, first_row: int = 0) -> tuple[Tensor, Tensor]:
        """Return the noise ``rows ...`` and the timesteps ``rows`` of some rows of the global batch, in float32.

        Args:
            shape: of the rows.
            step: number of the micro-step.
            first_row: number of the first one in the global batch.
        """
        rows = torch.arange(first_row, first_row + shape[0])
        noise = fill_normal_(
            torch.empty(shape),
            [rows, *map(torch.arange, shape[1:])],
            (_ROWS, *shape[1:]),
            seed=self.seed,
            key=key_of(f"noise/{step}"),
        )
        key = key_of(f"timesteps/{step}")
        if self.logit_normal:
            drawn = fill_normal_(torch.empty(shape[0]), [rows], (_ROWS,), seed=self.seed, key=key).sigmoid()
        else:
            drawn = uniform(self.seed, key, rows)
        times = drawn * 1000
        return noise, times if self.prediction == "flow" else times.long().clamp(max=999)

    def batch(self, clean: Tensor, step: int, first_row: int = 0) -> dict[str, Tensor]:
        """Return ``noisy``, ``timestep``, ``target`` and ``weight`` of clean images or latents ``rows ...``."""
        noise, times = self.draw(tuple(clean.shape), step, first_row)
        signal, share = (x.view(-1, *[1] * (clean.dim() - 1)) for x in self.signal_and_noise(times))
        noisy = signal * clean + share * noise
        target = {
            "epsilon": noise,
            "v": signal * noise - share * clean,
            "x0": clean,
            "flow": noise - clean,
        }[self.prediction]
        found = dict(noisy=noisy, timestep=times, target=target, weight=self.weights(times))
        return {name: x.to(clean.dtype) if x.is_floating_point() else x for name, x in found.items()}

    def weights(self, times: Tensor) -> Tensor:
        """Return the weight of each row's squared error, in float64."""
        if self.min_snr is None:
            return torch.ones(times.shape, dtype=torch.float64)
        signal, noise = self.signal_and_noise(times)
        ratio = (signal / noise) ** 2
        least = ratio.clamp(max=self.min_snr)
        return {"epsilon": least / ratio, "v": least / (ratio + 1), "x0": least}[self.prediction]

    @torch.no_grad()
    def sample(self, model: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int = 50) -> Tensor:
        """Return images made of noise ``rows ...``: by DDIM (Song et al. 2020, arXiv 2010.02502), or Euler's steps for a flow.

        ``model``: from noisy images ``rows ...`` and timesteps ``rows`` to its prediction.
        """
        x = noise
        times = torch.linspace(1000 if self.prediction == "flow" else 999, 0, steps + 1)
        for now, then in itertools.pairwise(times):
            at = now.expand(x.shape[0]).to(x.device)
            out = model(x, at if self.prediction == "flow" else at.long())
            (a, s), (b, r) = (self.signal_and_noise(t.to(x.device)) for t in (now, then))
            if self.prediction == "flow":
                x = x + (r - s).to(x.dtype) * out
                continue
            clean = {"epsilon": (x - s * out) / a, "v": a * x - s * out, "x0": out}[self.prediction]
            x = (b * clean + r * (x - a * clean) / s).to(x.dtype)
        return x


class WeightedSquares:
    """Mean over rows of the weighted squared distance of a denoiser's output from ``target``: a ``loss_fn`` of an Engine."""

    batch_fields = ("target", "weight")

    def __call__(self, output: Any, batch: Any) -> Tensor:
        found = output.sample if hasattr(output, "sample") else output[0]
        errors = (found - batch["target"]).square().flatten(1).mean(1)
        return (errors * batch["weight"]).mean()
