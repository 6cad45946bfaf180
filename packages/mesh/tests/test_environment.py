"""Which rank this is: torchrun's variables, Slurm's, or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes import groups, process_group
from meshfold.mesh.processes.environment import Environment, expand_nodes

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[003-004]",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}


def test_torchrun() -> None:
    assert Environment.detect(TORCHRUN) == Environment(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="node1",
        master_port=29500,
        source="torchrun",
    )


def test_what_it_writes_it_reads() -> None:
    environment = Environment.detect(TORCHRUN)
    assert Environment.detect(environment.variables()) == environment


def test_torchrun_goes_before_slurm() -> None:
    assert Environment.detect(SLURM | TORCHRUN).source == "torchrun"


def test_slurm() -> None:
    assert Environment.detect(SLURM) == Environment(
        rank=6,
        world_size=7,
        local_rank=2,
        local_world_size=3,
        master_addr="node003",
        master_port=15000 + 123456 % 15000,
        source="slurm",
    )


def test_slurm_takes_an_address_that_the_user_gives() -> None:
    environment = Environment.detect(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (environment.master_addr, environment.master_port) == ("10.0.0.1", 4000)


def test_slurm_step_goes_before_its_allocation() -> None:
    step = {"SLURM_STEP_NODELIST": "node004", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    environment = Environment.detect(SLURM | step)
    assert (environment.master_addr, environment.local_world_size) == ("node004", 7)


def test_slurm_repeats_counts_of_tasks() -> None:
    tasks = {"SLURM_NTASKS": "11", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}
    assert Environment.detect(SLURM | tasks).local_world_size == 3


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOME": "/somewhere"},
        {k: v for k, v in SLURM.items() if k not in ("SLURM_PROCID", "SLURM_STEP_ID")},  # an allocation, no step
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # a shell on a node of the cluster
    ],
)
def test_single(variables: dict[str, str]) -> None:
    assert Environment.detect(variables) == Environment()
    assert Environment().world_size == 1


def test_a_world_of_one_needs_no_address() -> None:
    environment = Environment.detect({"RANK": "0", "WORLD_SIZE": "1"})
    assert (environment.world_size, environment.local_world_size, environment.master_addr) == (1, 1, "")


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_variable_of_torchrun_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"lacks {name}: .*meshfold run"):
        Environment.detect({k: v for k, v in TORCHRUN.items() if k != name})


@pytest.mark.parametrize("name", ["SLURM_NODELIST", "SLURM_LOCALID", "SLURM_JOB_ID"])
def test_a_variable_of_slurm_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"lacks {name}: .*srun"):
        Environment.detect({k: v for k, v in SLURM.items() if k != name})


@pytest.mark.parametrize("name", [name for name in TORCHRUN if name != "MASTER_ADDR"])
@pytest.mark.parametrize("value", ["", "two", "-1", "1.5", "0x2", "1e3"])
def test_a_variable_that_is_no_number_is_quoted(name: str, value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Environment.detect(TORCHRUN | {name: value})
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "8"}, "RANK=8 but WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 but LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 but WORLD_SIZE=8"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MASTER_ADDR": ""}, "lacks MASTER_ADDR"),
    ],
)
def test_variables_that_contradict_each_other(change: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Environment.detect(TORCHRUN | change)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[003-005,012]", ["node003", "node004", "node005", "node012"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("gpu-a[1-2],login,x[7]", ["gpu-a1", "gpu-a2", "login", "x7"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("node[1-2]-ib", ["node1-ib", "node2-ib"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_nodes(text) == hosts


@pytest.mark.parametrize("text", ["", "node[", "node]", "node[1-", "node[5-3]", "node[a]", "a,,b", "node[1]]"])
def test_node_lists_that_are_none_are_quoted(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        expand_nodes(text)
    assert repr(text) in str(caught.value)


@given(st.text(alphabet="ab1290[]-,", max_size=12))
def test_any_text_is_a_node_list_or_an_error(text: str) -> None:
    try:
        hosts = expand_nodes(text)
    except LaunchError:
        return
    assert hosts and all(host and not set(host) & set("[],") for host in hosts)


def test_a_single_process_starts_a_world_of_one_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert not groups.is_started()
    with process_group.start(device="cpu") as process:
        assert (process.rank, process.world_size, process.backend, str(process.device)) == (
            0,
            1,
            "gloo",
            "cpu",
        )
        assert groups.is_started()
        again = process_group.start(device="cpu")
        again.close()  # it did not begin the process group, so it does not end it
        assert groups.is_started()
        with pytest.raises(LaunchError, match="'nccl' was asked for"):
            process_group.start(backend="nccl")
        with pytest.raises(LaunchError, match="already running"):
            process_group.start_fake(4)
    assert not groups.is_started()
    process.close()


def test_a_process_that_cannot_start_says_why() -> None:
    with pytest.raises(LaunchError, match="'nccl' needs a GPU"):
        process_group.start(Environment(), backend="nccl", device="cpu")
    with pytest.raises(LaunchError, match="needs GPU 99, but torch sees"):
        process_group.start(Environment(), device="cuda:99")
    nowhere = Environment(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=1
    )
    with pytest.raises(LaunchError, match=r"rank 1 of 2 could not start gloo at 127\.0\.0\.1:1: "):
        process_group.start(nowhere, device="cpu", timeout=0.5)
    assert not groups.is_started()
