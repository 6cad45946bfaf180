"""Checks of a split ESMFold on whatever device the ranks have.

Run as a program on ranks: ``meshfold run --ranks 2 packages/folding/tests/esmfold_checks.py``. ``meshfold bench folding --case
esmfold`` measures the time and memory of its trunk.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from esm_models import check_esmfold
from folding_checks import layouts

from meshfold.mesh import start


def main() -> None:
    """Check every layout of these ranks."""
    with start() as process:
        for mode, axes in layouts(process.world_size):
            check_esmfold(mode, axes, device=process.device, dropout=0.2)
            check_esmfold(mode, axes, device=process.device, recycles=0)
            if process.rank == 0:
                print(f"right  {mode:<5} {axes}", flush=True)


if __name__ == "__main__":
    main()
