"""Which implementation runs, who decides, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from meshfold import kernels as K
from meshfold.kernels import dispatch

F32 = torch.float32


class Seen(TorchFunctionMode):
    """Counts what a function mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.0 * x * dy


def test_function_modes_see_the_operations_of_kernels_only_beside_a_dispatch_mode() -> None:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    square = K.applied(Square)
    with Seen() as seen:
        y = square(x)
    assert seen.calls == 0
    with Seen() as seen, FlopCounterMode(display=False):
        followed = square(x)
    assert seen.calls > 0
    for each in (y, followed):
        (gradient,) = torch.autograd.grad(each.sum(), x)
        assert torch.equal(gradient, 2.0 * x)


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice made yet in this process."""
    monkeypatch.setattr(dispatch, "_choice", None)
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)


def test_import_is_light(torch_python: str) -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import meshfold.kernels, meshfold.kernels.dispatch as d; "
        "d.available(); print(sorted({m.split('.')[0] for m in set(sys.modules) - before} & "
        "{'numba', 'triton', 'transformers'}), [m for m in set(sys.modules) - before if m.startswith('torch._dynamo') "
        "or m.startswith('torch._inductor') or m.startswith('torch.distributed.tensor')])"
    )
    done = subprocess.run([torch_python, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[] []"), done.stderr


def test_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.implementation("norms", "cpu", F32) == "reference"
    assert dispatch.implementation("dropout", "cpu", F32) == "numba"
    monkeypatch.setattr(dispatch, "_installed", lambda package: True)
    assert dispatch.implementation("norms", "cuda", F32) == "triton"
    assert dispatch.implementation("norms", "cuda", torch.bfloat16) == "triton"
    assert dispatch.implementation("norms", "cuda", torch.float64) == "reference"
    assert dispatch.implementation("norms", "meta", F32) == "reference"
    for family, (_, twins) in dispatch.FAMILIES.items():
        assert (dispatch.implementation(family, "cuda", F32) == "triton") == ("triton" in twins)
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    assert dispatch.implementation("norms", "cuda", F32) == "reference"
    assert dispatch.implementation("dropout", "cpu", F32) == "reference"


def test_use_lasts_as_a_call_and_ends_as_a_block() -> None:
    with K.use("reference"):
        assert dispatch.implementation("dropout", "cpu", F32) == "reference"
        with K.use("numba"):
            assert dispatch.implementation("dropout", "cpu", F32) == "numba"
            assert dispatch.implementation("norms", "cpu", F32) == "reference"  # it has no numba twin
        assert dispatch.choice() == "reference"
        K.use("numba")
        assert dispatch.choice() == "numba"
    assert dispatch.choice() == "auto"


def test_the_environment_chooses(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "reference")
    assert dispatch.implementation("dropout", "cpu", F32) == "reference"
    monkeypatch.setattr(dispatch, "_choice", None)
    monkeypatch.setenv(dispatch.ENVIRONMENT, "cuda")
    with pytest.raises(ValueError, match="MESHFOLD_KERNELS is 'cuda'; it must be one of 'auto', 'reference'"):
        K.rms_norm(torch.ones(2, 2), None)


def test_a_wrong_word_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match=r"given to use\(\) is 'fast'"):
        K.use("fast")
    assert dispatch.choice() == "auto"


def test_a_choice_that_cannot_be_is_an_error() -> None:
    if not torch.cuda.is_available():
        with K.use("triton"), pytest.raises(K.KernelError, match="'triton' was chosen, but"):
            K.rms_norm(torch.ones(2, 2), None)
    with K.use("numba"), pytest.raises(K.KernelError, match="numba kernels run on the CPU, not on cuda"):
        dispatch.implementation("dropout", "cuda", F32)


def test_backward_runs_where_forward_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.kernels import dropout_numba

    calls = []
    plain = dropout_numba.drop

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dropout_numba, "drop", counted)
    x = torch.ones(4, 4, requires_grad=True)
    with K.use("numba"):
        y = K.dropout(x, 0.5, 1, 2)
    with K.use("reference"):
        y.sum().backward()
    assert len(calls) == 2


def test_tensors_without_memory_take_the_reference() -> None:
    with FakeTensorMode():
        x = torch.ones(4, 8, requires_grad=True)
        y = K.dropout(K.swiglu(K.rms_norm(x, None)), 0.5, 1, 2)
        y.sum().backward()
        assert y.shape == (4, 4) and x.grad is not None
    assert K.layer_norm(torch.ones(4, 8, device="meta"), None, None).device.type == "meta"


def test_available_says_what_there_is() -> None:
    rows = {row.family: row for row in K.available()}
    assert set(rows) == set(dispatch.FAMILIES)
    for row in rows.values():
        assert row.implementations["reference"] == "ok" and row.cpu in ("reference", "numba")
        for name in row.kernels.replace(" and their pieces", "").replace(" and its pieces", "").split(", "):
            assert callable(getattr(K, name)), name
    assert rows["dropout"].implementations["numba"] == "ok"
    assert set(rows["norms"].implementations) == {"reference", "triton"}
    if not torch.cuda.is_available():
        assert rows["norms"].implementations["triton"] in ("no CUDA device", "triton is not installed")
        assert rows["norms"].cuda == ""


def functions(module: str) -> dict[str, str]:
    """Return the functions of a module and their signatures, read from its source: Triton need not be there."""
    path = Path(dispatch.__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns or ast.Constant(None))}" for node in found
    }


def names_in_table(tree: ast.Module, table: str) -> list[str]:
    """Return the functions that a module's table has as its values."""
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(name), value=ast.Dict(values=values)) if name == table:
                return [value.id for value in values if isinstance(value, ast.Name)]
    raise AssertionError(f"{table} is no table of the module")


def given_to_dispatch() -> dict[str, set[str]]:
    """Return the functions that each family gives to ``dispatch.twin`` and ``dispatch.piece``."""
    found: dict[str, set[str]] = {}
    root = Path(dispatch.__file__).parent
    # A module that is no family gives functions of others.
    homes = {name: family for family in dispatch.FAMILIES for name in functions(dispatch.reference_of(family))}
    for path in root.rglob("*.py"):
        family = path.relative_to(root).with_suffix("").parts[0]
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name("dispatch"), attr="twin" | "piece"),
                    args=[ast.Name(name), *_],
                ):
                    names = [name]
                case ast.Call(
                    func=ast.Attribute(value=ast.Name("dispatch"), attr="twin" | "piece"),
                    args=[ast.Subscript(value=ast.Name(table)), *_],
                ):
                    names = names_in_table(tree, table)
                case _:
                    continue
            for name in names:
                found.setdefault(family if family in dispatch.FAMILIES else homes[name], set()).add(name)
    return found


def test_implementations_have_the_signatures_of_the_reference() -> None:
    """The reference states a signature once; what stands in for it has the same, argument by argument."""
    given = given_to_dispatch()
    assert set(given) == set(dispatch.FAMILIES)
    for family, (_, implementations) in dispatch.FAMILIES.items():
        reference = functions(dispatch.reference_of(family))
        for name in implementations:
            there = functions(dispatch.implementation_module(family, name))
            for function in given[family]:
                assert there.get(function) == reference[function], (
                    f"{function} of {dispatch.implementation_module(family, name)}"
                )


CHOSEN_BY_GENERATORS = {
    "one_shot_packets_triton.py",
    "one_shot_triton.py",
    "packed_weight_triton.py",
    "paged_attention_triton.py",
    "row_codes_triton.py",
    "row_product_triton.py",
    "row_words_triton.py",
    "token_state_triton.py",
    "weights_ahead_triton.py",
    "word_choice_triton.py",
}
"""Kernels that are tried on a device before they are used."""
LAUNCHED_BY_OTHERS = {"norm_passes_triton.py"}
"""Kernels of an implementation that has its functions in another file."""


def test_no_implementation_is_left_out_of_the_table() -> None:
    root = Path(dispatch.__file__).parent
    files = {path for kind in ("triton", "numba") for path in root.rglob(f"*[a-z]_{kind}.py")}
    known = [
        dispatch.implementation_module(family, name)
        for family, (_, names) in dispatch.FAMILIES.items()
        for name in names
    ]
    others = CHOSEN_BY_GENERATORS | LAUNCHED_BY_OTHERS
    assert {path.name for path in files} >= others
    assert {path for path in files if path.name not in others} == {
        root.parents[1].joinpath(*module.split(".")).with_suffix(".py") for module in known
    }


def test_parameters_of_any_class_are_passed_to_kernels() -> None:
    """An engine's parameters have classes of their own. Of a fake tensor there is a parameter, too, but no memory."""
    from torch._subclasses import FakeTensorMode

    class Own(torch.nn.Parameter):
        pass

    x = torch.zeros(2)
    with FakeTensorMode():
        fake = torch.zeros(2)
    assert all(dispatch.has_memory(one) for one in (x, torch.nn.Parameter(x), Own(x)))
    assert not dispatch.has_memory(fake) and not dispatch.has_memory(torch.nn.Parameter(fake))
