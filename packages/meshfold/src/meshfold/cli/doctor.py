"""Check the installed packages, which kernels and devices work, and whether ranks on this machine reach each other.

The exit code is 0 if everything that Meshfold needs is installed and every self-test passed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "numba",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "matplotlib",
    "rich",
)
DISTRIBUTIONS = {
    "meshfold": "meshfold.cli",
    "meshfold-mesh": "meshfold.mesh",
    "meshfold-kernels": "meshfold.kernels",
    "meshfold-optimizers": "meshfold.optimizers",
    "meshfold-experts": "meshfold.experts",
    "meshfold-tensor-parallel": "meshfold.tensor_parallel",
    "meshfold-pipeline": "meshfold.pipeline",
    "meshfold-zero-gemini": "meshfold.zero_gemini",
    "meshfold-checkpoint": "meshfold.checkpoint",
    "meshfold-models": "meshfold.models",
    "meshfold-folding": "meshfold.folding",
    "meshfold-inference": "meshfold.inference",
    "meshfold-engine": "meshfold.engine",
    "meshfold-planner": "meshfold.planner",
    "meshfold-huggingface": "meshfold.huggingface",
    "meshfold-align": "meshfold.align",
    "meshfold-lightning": "meshfold.lightning",
    "meshfold-colossalai": "meshfold.colossalai",
}
REQUIRED = ("meshfold", "meshfold-mesh", "meshfold-kernels", "meshfold-tensor-parallel")
_RANKS = 2  # of a self-test


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold doctor``."""
    parser.add_argument(
        "--no-test", action="store_true", help="leave out the self-test of collectives, which starts ranks"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold doctor``."""
    found: dict[str, Any] = {
        "machine": machine(),
        "packages": {name: version(name) for name in PACKAGES},
        "distributions": {name: distribution(name, module) for name, module in DISTRIBUTIONS.items()},
        "devices": devices(),
        "kernels": kernels(),
    }
    if not arguments.no_test:
        print("testing collectives on 2 local ranks ...", file=sys.stderr)
        found["collectives"] = [self_test("gloo")]
        if len(found["devices"]["gpus"]) >= 2:
            found["collectives"].append(self_test("nccl"))
    problems = [f"{name} is not installed" for name in REQUIRED if found["distributions"][name] is None]
    problems += [
        f"{test['backend']}: {test['error']}" for test in found.get("collectives", []) if test["error"] is not None
    ]
    found["problems"] = problems
    print(json.dumps(found, indent=1) if arguments.json else _text(found))
    return int(bool(problems))


def machine() -> dict[str, Any]:
    """Return the versions of Python and the system, and the number of cores."""
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"python": platform.python_version(), "system": platform.platform(), "cores": cores}


def version(package: str) -> str | None:
    """Return the installed version of a package, None without it."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def distribution(name: str, module: str) -> str | None:
    """Return a distribution's version; "from source" if only its module can be imported; None without it."""
    from meshfold.mesh.spec import is_importable

    if not is_importable(module):
        return None
    return version(name) or "from source"


def devices() -> dict[str, Any]:
    """Return the GPUs that torch sees, and the versions of CUDA and NCCL."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version() if gpus else None
    return {
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
            for gpu in gpus
        ],
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
    }


def kernels() -> list[dict[str, Any]]:
    """Return the kernels with their implementations, and the one used for a tensor."""
    from meshfold.kernels import available

    return [
        {
            "family": row.family,
            "kernels": row.kernels,
            "implementations": dict(row.implementations),
            "cpu": row.cpu,
            "cuda": row.cuda,
        }
        for row in available()
    ]


def self_test(backend: str) -> dict[str, Any]:
    """Start ranks that try every collective; return their result, or why it failed."""
    from meshfold.mesh.processes import launch

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        begin = time.perf_counter()
        code = launch(["-m", "meshfold.cli.selftest", backend, str(answer)], _RANKS)
        seconds = time.perf_counter() - begin
        error = None if code == 0 and answer.exists() else f"the ranks ended with code {code}; see above"
        passed = json.loads(answer.read_text()) if error is None else []
    return {
        "backend": backend,
        "ranks": _RANKS,
        "passed": passed,
        "seconds": round(seconds, 2),
        "error": error,
    }


def _text(found: dict[str, Any]) -> str:
    here, seen = found["machine"], found["devices"]
    lines = [f"Python {here['python']} on {here['system']}, {here['cores']} cores", "", "packages"]
    lines += [f"  {name:<26}{text or 'not installed'}" for name, text in found["packages"].items()]
    lines += ["", "Meshfold"]
    lines += [f"  {name:<26}{text or 'not installed'}" for name, text in found["distributions"].items()]
    lines += ["", "devices"]
    lines += [
        f"  {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, capability {gpu['capability']}"
        for gpu in seen["gpus"]
    ] or ["  no GPU that torch can use: work goes to the CPU"]
    if seen["gpus"]:
        lines.append(f"  CUDA {seen['cuda']}, NCCL {seen['nccl']}")
    lines += ["", "kernels            on the CPU   on a GPU   elsewhere"]
    for row in found["kernels"]:
        reasons = [f"no {name}: {text}" for name, text in row["implementations"].items() if text != "ok"]
        lines.append(
            f"  {row['family']:<17}{row['cpu'] or '–':<13}{row['cuda'] or '–':<11}{'; '.join(reasons)}".rstrip()
        )
    for test in found.get("collectives", []):
        how = (
            f"{', '.join(test['passed'])}: all well, {test['seconds']:.1f} s"
            if test["error"] is None
            else test["error"]
        )
        lines += ["", f"collectives over {test['backend']} on {test['ranks']} ranks", f"  {how}"]
    lines += ["", "problems: " + "; ".join(found["problems"]) if found["problems"] else "no problems found"]
    return "\n".join(lines)
