"""The paper's settings: models, profiled times, and the times behind table 8, which have to be found again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from experiments.report import read_csv
from experiments.zero_bubble.heuristic import Lists, Times
from meshfold.pipeline import Schedule, Simulation, schedule, simulate_costs

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on p ranks with m micro-batches of b samples.

    Attributes:
        chunks: stages a rank holds under 1F1B-I, one layer each. The first and the last stage have a layer less, for
            embedding and loss, so p times this is two more than the layers.
        times: in milliseconds, or in those of TF + TB + TW where they were fitted.
    """

    model: str
    p: int
    m: int
    b: int
    chunks: int
    times: Times

    @property
    def work(self) -> float:
        """What a rank computes in a step."""
        return self.m * self.times.total

    def make(self, name: str, chunks: int | None = None) -> Schedule:
        """A named schedule of this size."""
        return schedule(name, ranks=self.p, microbatches=self.m, chunks=chunks)

    def make_own(self, function: Callable[..., Lists]) -> Schedule:
        """A schedule of one's own of this size, checked, within twice 1F1B's memory."""
        return schedule(function, ranks=self.p, microbatches=self.m, costs=self.times.costs(), memory=2 * self.p)

    def rate(self, made: Schedule, times: Times | None = None) -> float:
        """The paper's bubble rate: idle share of the longest span of a rank."""
        return self.run(made, times).span_bubble

    def run(self, made: Schedule, times: Times | None = None) -> Simulation:
        """A schedule on the clock."""
        return simulate_costs(made, (times or self.times).costs(made.chunks))


def published_settings(models: Collection[str] = ()) -> list[Setting]:
    """Those of tables 3, 4 and 5, of some models or of all."""
    return [
        Setting(
            model=row["model"],
            p=int(row["p"]),
            m=int(row["m"]),
            b=int(row["microbatch_size"]),
            chunks=(int(row["layers"]) + 2) // int(row["p"]),
            times=Times(
                forward=float(row["TF"]),
                backward_input=float(row["TB"]),
                backward_weight=float(row["TW"]),
                send=float(row["Tcomm"]),
                kept=_kept(int(row["heads"]), int(row["hidden"]), int(row["sequence"])),
            ),
        )
        for row in read_csv(FOLDER / "published_costs.csv")
        if not models or row["model"] in models
    ]


def fitted_settings(models: Collection[str] = ()) -> list[Setting]:
    """Those of table 8, of some models or of all, in units of TF + TB + TW.

    Tcomm is from its rate of 1F1B, TW from its rate of ZB-H1, TF / TB from table 9.
    """
    like = {one.model: one for one in published_settings(models)}
    found = []
    for row in read_csv(FOLDER / "published_rates_v.csv"):
        if row["model"] not in like:
            continue
        known = like[row["model"]]
        p = int(row["p"])
        chunks = known.chunks * known.p // p
        size = dict(p=p, m=int(row["m"]), b=known.b, chunks=chunks)
        times = _fit(Setting(model=row["model"], times=known.times, **size), float(row["1F1B"]), float(row["ZB-H1"]))
        found.append(Setting(model=row["model"], times=times, **size))
    return found


def _kept(heads: int, hidden: int, sequence: int) -> float:
    """M_W / M_B of table 1."""
    return 32 * hidden / (34 * hidden + 5 * heads * sequence)


def _fit(setting: Setting, one_f_one_b: float, zb_h1: float) -> Times:
    ratio = setting.times.forward / setting.times.backward_input
    first, second = setting.make("1f1b"), setting.make("zb-h1")

    def times(weight: float, send: float) -> Times:
        backward = (1 - weight) / (1 + ratio)
        return Times(
            forward=1 - weight - backward,
            backward_input=backward,
            backward_weight=weight,
            send=send,
            kept=setting.times.kept,
        )

    # 1F1B does W with B, so that its rate hardly hangs on TW: a guess is enough to find Tcomm, and with it TW.
    send = _solve(lambda x: setting.rate(first, times(0.27, x)) - one_f_one_b, 0.02)
    weight = _solve(lambda x: setting.rate(second, times(x, send)) - zb_h1, 0.27)
    return times(weight, send)


def _solve(function: Callable[[float], float], near: float) -> float:
    """Where a function that is nearly straight is 0: secants, to 5e-6."""
    x0, x1 = near, near * 1.02
    y0, y1 = function(x0), function(x1)
    for _ in range(8):
        if abs(y1) < 5e-6 or y1 == y0:
            break
        x0, x1, y0 = x1, x1 - y1 * (x1 - x0) / (y1 - y0), y1
        y1 = function(x1)
    return x1
