"""Draw every picture of the documentation anew, from the library's own objects.

python docs/pictures/make.py            # into this folder
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from docs.pictures import axial, confidence, dispatch, packages  # noqa: E402
from docs.refresh import run_here  # noqa: E402
from matplotlib import rc_context  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

from meshfold.mesh import Mesh, ParallelSpec, Placement  # noqa: E402
from meshfold.pipeline import schedule, simulate  # noqa: E402
from meshfold.pipeline.scheduling.drawing import scene, svg  # noqa: E402
from meshfold.tensor_parallel import MODES, draw_matmul, draw_mesh, draw_mode, plan  # noqa: E402
from meshfold.zero_gemini.planner import GiB, timeline  # noqa: E402
from meshfold.zero_gemini.planner.paint import timeline_figure  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meshfold.pipeline import Simulation
    from meshfold.zero_gemini.planner import Plan

HERE = Path(__file__).resolve().parent
MODE_MESHES = {
    "1d": dict(tensor=4),
    "1d+sequence": dict(tensor=4),
    "2d": dict(row=2, col=2),
    "2.5d": dict(depth=2, row=2, col=2),
    "3d": dict(a=2, b=2, c=2),
}

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "hanayo", "dualpipe-v")

Picture = tuple[str, Callable[[], "Figure | str"]]
"""What a picture shows, in words that change when it should; and what draws it, or writes its SVG."""


@functools.cache
def pictures() -> dict[str, Picture]:
    """Every picture by its file name."""
    spec = ParallelSpec.parse(dict(data=2, tensor=dict(mode="2d", size=4)))
    mesh = Mesh(spec.axes)
    found: dict[str, Picture] = {
        "mesh.svg": (repr(mesh), lambda: draw_mesh(mesh, "data", "row", "col")),
    }
    for name, sizes in MODE_MESHES.items():
        found[f"mode-{name.replace('+', '-')}.svg"] = _mode(name, Mesh(sizes))
    both = plan(x="m:dp k:t", w="k:t,dp n", y="m:dp,t n")
    grid = Mesh(dict(dp=2, t=2))
    found["matmul.svg"] = (f"{both}\n{grid}", lambda: draw_matmul(both, grid))
    own = names_of("own-mode.md", "mine", "mesh")
    found["own-mode.svg"] = _mode(own["mine"], own["mesh"])
    found["zero-plan.svg"] = _timeline(names_of("zero-plan.md", "found")["found"].plan)
    for name in SCHEDULES:
        hanayo = name == "hanayo"  # its stages are small: with fewer micro-batches their numbers can be read
        made = schedule(name, ranks=4, microbatches=4 if hanayo else 8, waves=2 if hanayo else None)
        found[f"schedule-{name}.svg"] = _schedule(simulate(made))
    shown = names_of("pipeline.md", "found_result", "own_result")
    found["schedule-auto.svg"] = _schedule(shown["found_result"])
    found["schedule-own.svg"] = _schedule(shown["own_result"])
    found["dispatch.svg"] = (dispatch.description(), dispatch.draw)
    found["axial.svg"] = (axial.description(), axial.draw)
    found["confidence.png"] = (confidence.description(), confidence.draw)
    found["packages.svg"] = (packages.description(), packages.draw)
    found["dropout.png"] = (f"{ROWS} x {COLUMNS}, p = {SHARE}, {STREAMS}", draw_dropout)
    return found


def _mode(mode: Any, mesh: Mesh) -> Picture:
    known = MODES[mode] if isinstance(mode, str) else mode
    return f"{known}\n{mesh}", lambda: draw_mode(known, mesh)


def _schedule(result: Simulation) -> Picture:
    return scene(result).words, lambda: svg(result, width=480)


def _timeline(made: Plan) -> Picture:
    """What a plan holds at every moment. The words leave out seconds, which constants of machines decide."""
    places = Counter((chunk.state, chunk.parameters) for chunk in made.chunks)
    words = (
        f"{made.workload.name} in {made.limits.gpu_bytes} bytes: {made.peak_gpu_bytes / GiB:.0f} GiB, {dict(places)}"
    )
    return words, lambda: timeline_figure(made, timeline(made))


@functools.cache
def names_of(page: str, *wanted: str) -> dict[str, Any]:
    """Return the objects that a page's Python gave these names; what it writes goes to a folder that does not stay."""
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        return run_here((ROOT / "docs" / page).read_text(encoding="utf-8"), page, *wanted)[1]


ROWS, COLUMNS, SHARE = 16, 24, 0.3
STREAMS = {"1d": dict(tensor=1), "1d+sequence": dict(tensor=4), "2d": dict(row=2, col=2)}


def draw_dropout() -> Figure:
    """What dropout keeps of the residual stream, put together from what each rank keeps of its own block."""
    from meshfold.kernels import use
    from meshfold.mesh.random.dropout import dropout_stream
    from meshfold.tensor_parallel.layers.dropout import Dropout
    from meshfold.tensor_parallel.plot.paint import INK, color, new_figure, veil

    figure = new_figure((4.2, 9.0))
    for number, (name, sizes) in enumerate(STREAMS.items()):
        mode, world = MODES[name], Mesh(sizes).world_size
        residual = mode.layout("residual")
        place = Placement(shape=(ROWS, COLUMNS), axes=tuple(residual.values()))
        canvas = figure.add_axes((0.02, 0.01 + (len(STREAMS) - 1 - number) / 3, 0.96, 0.29))
        canvas.set(xlim=(-0.3, COLUMNS + 0.3), ylim=(ROWS + 0.3, -0.3), aspect="equal")
        canvas.set_title("one rank" if world == 1 else f"{name} on {world} ranks: {residual}", fontsize=9, color=INK)
        canvas.set_axis_off()
        for rank in range(world):
            mesh = Mesh(sizes, rank=rank)
            layer = Dropout(SHARE, mesh, mode, hidden=COLUMNS, name="dropout")
            with use("reference"), dropout_stream(seed=0, step=0):
                kept = layer(torch.ones(place.local_shape(mesh))).bool()
            down, across = (place.coordinates(mesh, dim).tolist() for dim in (0, 1))
            shade = color(rank, 4)
            for row, flags in zip(down, kept.tolist(), strict=True):
                for column, flag in zip(across, flags, strict=True):
                    fill = veil(shade, 1.0 if flag else 0.14)
                    canvas.add_patch(Rectangle((column + 0.08, row + 0.08), 0.84, 0.84, facecolor=fill, linewidth=0))
    return figure


def make(folder: Path, *names: str) -> list[Path]:
    """Draw the pictures of these names, by default all, into a folder; the same input gives the same bytes."""
    made, known = [], pictures()
    for name in names or known:
        words, draw = known[name]
        stamp = (
            "Date" if name.endswith(".svg") else "Software"
        )  # what else differs from run to run, or version to version
        with rc_context({"svg.hashsalt": name}):
            drawn = draw()
            if isinstance(drawn, str):
                (folder / name).write_text(drawn, encoding="utf-8")
            else:
                drawn.savefig(folder / name, metadata={stamp: None, "Description": words})
        made.append(folder / name)
    return made


if __name__ == "__main__":
    for path in make(HERE):
        print(path.relative_to(ROOT))
