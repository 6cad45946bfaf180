"""PDB files, inputs of several chains and confidence, against what transformers makes of the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.esm.openfold_utils import compute_predicted_aligned_error, compute_tm
from transformers.models.esmfold2.protein_utils import prepare_protein_features

from meshfold.folding import PairRows
from meshfold.folding.axial import WHOLE
from meshfold.huggingface import Atom, Structure
from meshfold.huggingface.confidence import confidence_of_rows
from meshfold.huggingface.folding_inputs import GAP, LINKER, complex_features, join_chains
from meshfold.mesh import MeshfoldError


def structure() -> Structure:
    """Return two chains of two residues and one; the second residue has no atoms."""
    atoms = (
        Atom(residue=0, name="N", position=(1.0, -2.5, 100.1234), plddt=90.0),
        Atom(residue=0, name="CA", position=(0.0, 0.0, -999.999), plddt=9.126),
        Atom(residue=2, name="HG11", position=(9999.0, 1.5, 2.5), plddt=100.0),
    )
    return Structure(
        chains=("GX", "V"),
        residue_names=("GLY", "UNK", "VAL"),
        atoms=atoms,
        plddt=torch.tensor([90.0, 40.0, 80.0]),
        pae=torch.zeros(3, 3),
        ptm=0.5,
        iptm=0.25,
    )


def test_a_pdb_file_has_the_columns_of_the_format() -> None:
    assert structure().to_pdb().splitlines() == [
        "ATOM      1  N   GLY A   1       1.000  -2.500 100.123  1.00 90.00           N  ",
        "ATOM      2  CA  GLY A   1       0.000   0.000-999.999  1.00  9.13           C  ",
        "TER       3      GLY A   1",
        "ATOM      4 HG11 VAL B   1    9999.000   1.500   2.500  1.00100.00           H  ",
        "TER       5      VAL B   1",
        "END",
    ]
    assert structure().mean_plddt == 70.0


@pytest.mark.parametrize("value", [1e5, -1e4, float("nan"), float("inf")])
def test_positions_without_room_are_refused(value: float) -> None:
    atoms = (Atom(residue=2, name="CA", position=(0.0, value, 0.0), plddt=1.0),)
    with pytest.raises(MeshfoldError, match=r"atom CA of residue 1 lies at \(0.0, .* a PDB file has no room for"):
        replace(structure(), atoms=atoms).to_pdb()


def test_chains_are_joined_by_a_linker() -> None:
    letters, positions, kept = join_chains(["ACD", "EF", "W"])
    assert letters == "ACD" + "G" * LINKER + "EF" + "G" * LINKER + "W"
    assert "".join(letters[number] for number in kept) == "ACDEFW"
    assert [positions[number] for number in kept] == [
        *(0, 1, 2),
        *(3 + LINKER + GAP, 4 + LINKER + GAP),
        5 + 2 * LINKER + 2 * GAP,
    ]
    assert join_chains(["ACD"]) == ("ACD", [0, 1, 2], [0, 1, 2])


def test_features_of_a_complex() -> None:
    chains = ["AC", "GGGGGGGGGW", "AC"]
    parts = [prepare_protein_features(chain) for chain in chains]
    found = complex_features(parts, chains)
    single = prepare_protein_features("".join(chains))
    assert found.keys() == single.keys()
    moved = {"residue_index", "asym_id", "entity_id", "sym_id"}
    for name, value in single.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        if name not in moved:  # all else is as if the chains were one
            assert torch.equal(found[name], value), name
    owner = [0, 0, *[1] * 10, 2, 2]
    assert found["asym_id"][0].tolist() == owner
    assert found["entity_id"][0].tolist() == [(1, 2, 1)[chain] for chain in owner]
    assert found["sym_id"][0].tolist() == [(0, 0, 1)[chain] for chain in owner]
    assert found["residue_index"][0].tolist() == [0, 1, *range(10), 0, 1]
    assert complex_features(parts[:1], chains[:1]) is parts[0]


def confidence(logits: Tensor, lengths: list[int]) -> tuple[Tensor, float, float | None]:
    """Return the confidence of pairs that are logits already, on one rank."""
    kept = torch.arange(sum(lengths))
    return confidence_of_rows(PairRows(logits.unsqueeze(0), WHOLE), lambda pairs: pairs, kept, lengths, largest=31.0)


@pytest.mark.parametrize("residues", [7, 40])
def test_confidence_equals_that_of_transformers(residues: int) -> None:
    logits = torch.randn(residues, residues, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    pae, ptm, iptm = confidence(logits, [residues])
    theirs = compute_predicted_aligned_error(logits, max_bin=31, no_bins=64)["predicted_aligned_error"]
    torch.testing.assert_close(pae, theirs, rtol=1e-5, atol=1e-5, check_dtype=False)
    assert ptm == pytest.approx(float(compute_tm(logits, max_bin=31, no_bins=64)), rel=1e-5)
    assert iptm is None


def test_confidence_between_chains_looks_at_other_chains_only() -> None:
    """Residues are sure of their own chain, and one residue is of the other one."""
    logits = torch.zeros(30, 30, 64, dtype=torch.float64)
    logits[:, :, 63] = 50.0
    for one, two in ((slice(0, 20), slice(0, 20)), (slice(20, 30), slice(20, 30)), (slice(25, 26), slice(0, 20))):
        logits[one, two] = 0.0
        logits[one, two, 0] = 50.0
    _, ptm, iptm = confidence(logits, [20, 10])
    assert ptm > 0.9 and iptm is not None and iptm > 0.9
    logits[25, :20] = logits[0, 25]
    _, ptm, iptm = confidence(logits, [20, 10])
    assert 0.6 < ptm < 0.7 and iptm is not None and iptm < 0.05
