"""``meshfold fold`` and an engine with ESMFold, on small random folders: structures are transformers' own, on ranks too."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "packages" / "folding" / "tests"))  # on every rank
from esm_models import esmfold, esmfold2, esmfold_inputs  # type: ignore[import-not-found]

from meshfold.cli import main
from meshfold.engine import Engine
from meshfold.folding import MemoryPlanError, adopt_models
from meshfold.huggingface import open_folding
from meshfold.mesh import Mesh, ParallelSpec, SpecError
from meshfold.mesh.testing import run_on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ESMFold with two passes through its trunk."""
    place = tmp_path_factory.mktemp("models") / "esmfold"
    esmfold().float().save_pretrained(place)
    return place


def coordinates(text: str) -> Any:
    """Return positions by name and residue of each atom of a PDB file; they are equal to the last digit but one."""
    atoms = [line for line in text.splitlines() if line.startswith("ATOM")]
    assert atoms
    return {
        line[12:27] + axis: pytest.approx(float(line[start : start + 8]), abs=2e-3)
        for line in atoms
        for axis, start in zip("xyz", (30, 38, 46), strict=True)
    }


def numbers(text: str) -> dict[str, float]:
    """Return the same as plain numbers."""
    return {name: value.expected for name, value in coordinates(text).items()}


def test_a_structure_is_that_of_transformers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import EsmForProteinFolding

    given = ["--sequence", "MKTAYIAKQR", "--output", str(tmp_path / "new" / "here")]
    assert main(["fold", "--model", str(folder), *given]) == 0
    printed = capsys.readouterr()
    text = (tmp_path / "new" / "here" / "sequence.pdb").read_text()
    model: Any = EsmForProteinFolding.from_pretrained(folder)
    assert numbers(text) == coordinates(model.infer_pdb("MKTAYIAKQR"))

    scores = json.loads((tmp_path / "new" / "here" / "sequence.json").read_text())
    out = model.infer("MKTAYIAKQR")
    assert scores["chains"] == ["MKTAYIAKQR"] and scores["iptm"] is None
    torch.testing.assert_close(torch.tensor(scores["plddt"]), 100 * out.plddt[0, :, 1], rtol=0, atol=0.01)
    torch.testing.assert_close(torch.tensor(scores["pae"]), out.predicted_aligned_error[0], rtol=0, atol=0.01)
    assert scores["ptm"] == pytest.approx(float(out.ptm), abs=1e-4)
    factors = [float(line[60:66]) for line in text.splitlines() if line.startswith("ATOM") and line[12:16] == " CA "]
    assert factors == scores["plddt"]
    assert (tmp_path / "new" / "here" / "sequence.png").read_bytes().startswith(b"\x89PNG")
    assert printed.out.startswith(f"sequence: pLDDT {scores['mean_plddt']:.1f}, pTM {scores['ptm']:.2f}, ")
    assert "EsmForProteinFolding loaded in" in printed.err and "; one rank on cpu\n" in printed.err
    assert "1/1 sequence: 10 residues, 1 chain; a pair tensor has 3.12 KiB\n" in printed.err
    assert "1/1 sequence: pass 1 of 2\n1/1 sequence: pass 2 of 2\n" in printed.err


@pytest.mark.usefixtures("warm_commands")
def test_ranks_write_what_one_writes(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">one\nACDEF\n>two of them\nGHIK:LMX\n")
    given = ["fold", "--model", str(folder), "--fasta", str(fasta), "--recycles", "0", "--output"]
    assert main([*given, str(tmp_path / "1")]) == 0
    assert main([*given, str(tmp_path / "3"), "--ranks", "3"]) == 0
    printed = capfd.readouterr()
    for name in ("one.pdb", "two.pdb"):
        one, three = ((tmp_path / ranks / name).read_text() for ranks in "13")
        assert numbers(one) == coordinates(three)
    assert [line[21:26] for line in three.splitlines() if line.startswith("TER")] == ["A   4", "B   2"]
    scores = json.loads((tmp_path / "3" / "two.json").read_text())
    assert scores["chains"] == ["GHIK", "LMX"] and scores["iptm"] is not None
    assert len(scores["plddt"]) == len(scores["pae"]) == 7
    assert "(1 unknown residue without atoms)" in printed.out
    assert "; dap axial=3 on cpu" in printed.err
    assert (
        "2/2 two: 7 residues, 2 chains; a pair tensor has 32.00 KiB, 10.67 KiB of it a rank, which sends" in printed.err
    )
    assert "pass 1 of 1" in printed.err


def test_a_second_run_goes_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">one\nACD\n>two\nGHI\n")
    given = ["fold", "--model", str(folder), "--fasta", str(fasta), "--output", str(tmp_path), "--recycles"]
    assert main([*given, "0"]) == 0
    (tmp_path / "two.json").unlink()  # it is written last: the run was ended before that
    wanted = (tmp_path / "two.pdb").read_text()
    (tmp_path / "two.pdb").write_text("half of a f")
    (tmp_path / "one.pdb").write_text("kept")
    capsys.readouterr()
    assert main([*given, "0"]) == 0
    printed = capsys.readouterr()
    assert f"1 of 2 proteins in {tmp_path} already: left out (--overwrite folds them again)\n" in printed.err
    assert "1/1 two: 3 residues" in printed.err and printed.out.startswith("two: pLDDT")
    assert (tmp_path / "one.pdb").read_text() == "kept" and (tmp_path / "two.pdb").read_text() == wanted
    assert main([*given, "1"]) == 2
    assert "one.json: it is of another run: its recycles is 0, and now it is 1" in capsys.readouterr().err
    (tmp_path / "one.json").write_text("{}")
    assert main([*given, "0"]) == 2
    assert "one.json: it is of another run: it does not say of which" in capsys.readouterr().err
    assert main([*given, "0", "--memory", "1KiB", "--overwrite"]) == 1
    said = capsys.readouterr().err
    assert "2 of 2 proteins do not fit into the 1.00 KiB of --memory, and nothing was folded" in said
    assert "one: 3 residues need " in said and " are weights and what is beside the trunk" in said


def test_an_interrupted_run_says_what_is_done(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshfold.huggingface.folding_models import EsmFold

    predict = EsmFold.predict

    def one_only(self: EsmFold, chains: Sequence[str], *given: Any, **more: Any) -> Any:
        if "GHI" in chains:
            raise KeyboardInterrupt
        return predict(self, chains, *given, **more)

    monkeypatch.setattr(EsmFold, "predict", one_only)
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">one\nACD\n>two\nGHI\n")
    given = ["--fasta", str(fasta), "--output", str(tmp_path), "--recycles", "0"]
    assert main(["fold", "--model", str(folder), *given]) == 130
    said = capsys.readouterr().err
    assert f"1 of 2 proteins in {tmp_path}; the same command goes on from there\n" in said
    assert said.endswith("meshfold fold: interrupted\n")


@pytest.mark.slow
def test_a_trunk_keeps_to_its_memory(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fold", "--model", str(folder), "--sequence", "MKTAYIAKQR:GSHM", "--recycles", "1", "--output"]
    assert main([*given, str(tmp_path / "whole")]) == 0
    assert main([*given, str(tmp_path / "lean"), "--memory", "450KiB"]) == 0
    whole, lean = ((tmp_path / name / "sequence.pdb").read_text() for name in ("whole", "lean"))
    assert numbers(whole) == coordinates(lean)
    assert "; a rank needs" in (told := capsys.readouterr().err) and ", chunks of " in told
    assert main([*given, str(tmp_path / "none"), "--memory", "150KiB"]) == 1
    said = capsys.readouterr().err
    assert "the protein does not fit into the 150.00 KiB of --memory, and nothing was folded: use more --ranks" in said
    assert "sequence: 14 residues need " in said


def test_what_follows_a_trunk_is_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure module and the confidences: of this rank's rows of pairs, some at a time."""
    model = open_folding(folder).load(Mesh({"axial": 1}, rank=0))
    one, four = (open_folding(folder).load(Mesh({"axial": ranks}, rank=0)).pairs_after(4096) for ranks in (1, 4))
    assert 4096**2 * 8 * 4 < one < 4096**2 * 8 * 4 * 2 and four < one / 2
    plan = model.plan_memory(["MKTAYIAKQR"], 1 << 30)
    assert plan.after_bytes == model.pairs_after(10) > 10 * 10 * 8 * 4
    assert plan.bytes == max(plan.after_bytes, plan.count.peak) + plan.weights + plan.other_bytes
    monkeypatch.setattr(type(model), "pairs_after", lambda self, tokens: 2 << 30)
    with pytest.raises(
        MemoryPlanError, match=r"the confidences after the trunk need 2\.00 GiB\. Give about \d+ residues"
    ) as refused:
        model.plan_memory(["MKTAYIAKQR"], 1 << 30)
    assert refused.value.least > 2 << 30 and refused.value.residues < 10


def test_esmfold_2_folds_a_complex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    esmfold2().save_pretrained(tmp_path / "model")
    given = ["fold", "--model", str(tmp_path / "model"), "--recycles", "0", "--output", str(tmp_path), "--sequence"]
    assert main([*given, "ACDEFGH"]) == 0
    from transformers import EsmFold2Model

    model: Any = EsmFold2Model.from_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    theirs = model.infer_protein_as_pdb("ACDEFGH", num_loops=0)
    text = (tmp_path / "sequence.pdb").read_text()
    assert numbers(text) == coordinates(theirs)
    assert main([*given, "ACDEF:GH:ACDEF"]) == 2
    assert (
        "sequence.json: it is of another run: its sequence is not this one. Give another --output"
        in capsys.readouterr().err
    )
    assert main([*given, "ACDEF:GH:ACDEF", "--overwrite"]) == 0
    text = (tmp_path / "sequence.pdb").read_text()
    assert [line[21:26] for line in text.splitlines() if line.startswith("TER")] == ["A   5", "B   2", "C   5"]
    assert "1/1 sequence: pass 1 of 1\n" in capsys.readouterr().err


def test_a_folder_of_esmfold_2_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    esmfold2().save_pretrained(tmp_path / "model")
    given = ["plan", "--hf", str(tmp_path / "model"), "--residues", "16,24", "--gpus", "1,2", "--gpu-memory"]
    assert main([*given, "1GiB", "--precision", "fp32", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert [one["residues"] for one in options] == [16, 16, 24, 24] and all(one["fits"] for one in options)
    assert options[0]["bytes"] > options[1]["bytes"] > 16 * 16 * 7 * 8 * 4  # seven pair tensors are whole


@pytest.mark.slow
def test_esmfold_2_keeps_to_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    esmfold2().save_pretrained(tmp_path / "model")
    given = ["fold", "--model", str(tmp_path / "model"), "--recycles", "0", "--sequence", 4 * "ACDEFGH", "--output"]
    assert main([*given, str(tmp_path / "whole"), "--memory", "1GiB"]) == 0
    told = capsys.readouterr().err
    assert "; a rank needs" in told and ", no chunks" in told
    taken = float(told.partition("a rank needs ")[2].split()[0])  # in KiB
    assert main([*given, str(tmp_path / "lean"), "--memory", f"{int(taken) - 20}KiB"]) == 0
    assert ", chunks of " in capsys.readouterr().err
    whole, lean = ((tmp_path / name / "sequence.pdb").read_text() for name in ("whole", "lean"))
    assert numbers(whole) == coordinates(lean)


def test_what_cannot_be_folded_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, other = tmp_path / "bare", tmp_path / "other"
    for place, config in (
        (bare, (folder / "config.json").read_text()),
        (other, '{"architectures": ["LlamaForCausalLM"]}'),
    ):
        place.mkdir()
        (place / "config.json").write_text(config)
    empty = tmp_path / "empty.fasta"
    empty.write_text("\n")
    model = ["--model", str(folder)]
    cases = [
        ([*model], "nothing to fold: give --sequence MLKNVQVQLV, or --fasta FILE"),
        ([*model, "--sequence", "ACBD"], "--sequence: 'B' at position 3 is no amino acid (D or N: write one of them)"),
        ([*model, "--sequence", "A", "--sequence", "A:"], "--sequence number 2: chain 2 is empty"),
        ([*model, "--fasta", str(empty)], "empty.fasta: no protein in it"),
        ([*model, "--fasta", str(tmp_path / "none")], "none: No such file or directory"),
        ([*model, "--fasta", str(empty), "--sequence", "A"], "--sequence and --fasta cannot both be given"),
        ([*model, "--sequence", "A", "--axial", "2x2", "--ranks", "3"], "--axial 2x2 takes 4 ranks, and --ranks is 3"),
        (
            [*model, "--sequence", "A", "--axial", "rows"],
            "--axial 'rows' is not known: write dap, grid, or a grid's size",
        ),
        ([*model, "--sequence", "A", "--output", str(empty)], "empty.fasta': it is a file; give a folder"),
        ([*model, "--sequence", str(empty)], "empty.fasta: it is a file; write --fasta"),
        ([*model, "--fasta", "MKTAY"], "--fasta MKTAY: there is no such file; write amino acids as --sequence MKTAY"),
        (["--model", str(tmp_path / "none"), "--sequence", "A"], "there is no such folder; give a local folder"),
        (["--model", str(bare), "--sequence", "A"], "it has no weights, and random ones predict nothing"),
        (
            ["--model", str(other), "--sequence", "A"],
            "it has LlamaForCausalLM, which does not fold: give a folder of EsmForProteinFolding or EsmFold2Model",
        ),
    ]
    for words, sentence in cases:
        assert main(["fold", *words]) != 0
        assert sentence in capsys.readouterr().err, words


def test_weights_that_are_missing_are_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors["trunk.blocks.1.mlp_pair.mlp.1.bias"]
    save_file(tensors, tmp_path / "model.safetensors", dict(format="pt"))
    with pytest.raises(SpecError, match=r"1 tensors are missing in its weights, such as trunk.blocks.1.mlp_pair.mlp.1"):
        open_folding(tmp_path).load(Mesh({}, rank=0))


def loss(out: Any, batch: tuple[Any, Tensor]) -> Tensor:
    """Return a loss of pairs, confidence and positions."""
    found: Tensor = out.s_z.square().mean() + (out.plddt - batch[1]).square().mean() + out.positions.square().mean()
    return found


def train(spec: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of an ESMFold after a step, in float64."""
    types, mask = esmfold_inputs(7)
    batch = ((types, mask), torch.full((2, 7, 37), 0.3, dtype=torch.float64))
    model = adopt_models(esmfold(max_recycles=1, dropout=0.1))
    with Engine(model, spec, loss_fn=loss, precision="fp64", optimizer=dict(name="adamw", lr=0.01)) as engine:
        losses = [float(engine.train_step(engine.shard_batch(batch))) for _ in range(1)]
        return losses, {name: value.clone() for name, value in engine.full_state_dict().items()}


@pytest.mark.parametrize(
    "spec",
    [
        dict(axial=2, zero=dict(stage=3)),
        pytest.param(dict(data=2, axial=2), marks=pytest.mark.slow),
        pytest.param(dict(axial=dict(mode="grid", rows=2, columns=2), zero=dict(stage=1)), marks=pytest.mark.slow),
    ],
)
def test_an_engine_trains_esmfold_as_on_one_process(spec: dict[str, Any]) -> None:
    wanted = train({})
    for losses, weights in run_on_ranks(ParallelSpec.parse(spec).world_size, train, spec):
        assert losses == pytest.approx(wanted[0], rel=1e-9)
        for name, value in wanted[1].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-7, atol=1e-8, msg=name)
