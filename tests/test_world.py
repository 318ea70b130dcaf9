"""The position of a process in its job, and the variables from which it is read."""

import pickle

import pytest

from fabric.errors import ConfigurationError
from fabric.world import World

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29511",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_a_world_without_arguments_is_a_single_process() -> None:
    world = World()
    assert world.rank == 0
    assert world.world_size == 1
    assert world.num_nodes == 1
    assert world.port is None
    assert world.store is None


@pytest.mark.parametrize(
    "numbers",
    [
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"local_rank": 1},
        {"local_rank": -1},
        {"local_world_size": 0},
        {"local_world_size": 2},
        {"node_rank": -1},
        {"node_rank": 1},
        {"rank": 0, "local_rank": 1, "world_size": 2, "local_world_size": 2},
        {"rank": 3, "local_rank": 1, "node_rank": 3, "world_size": 4, "local_world_size": 2},
    ],
    ids=str,
)
def test_numbers_that_contradict_each_other_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="contradict each other") as caught:
        World(**numbers)
    assert caught.value.expected
    assert caught.value.suggestion


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "nodes"),
    [(1, 1, 1), (4, 4, 1), (4, 2, 2), (6, 2, 3), (5, 3, 2), (5, 2, 3)],
)
def test_the_number_of_nodes_is_one_only_when_all_processes_are_here(
    world_size: int, local_world_size: int, nodes: int
) -> None:
    world = World(world_size=world_size, local_world_size=local_world_size)
    assert world.num_nodes == nodes


@pytest.mark.parametrize(
    ("rank", "world_size", "ranks"),
    [(0, 1, ()), (0, 2, (1,)), (0, 4, (1, 3)), (2, 4, (1, 3)), (7, 16, (6, 8))],
)
def test_the_neighbours_of_a_rank_are_those_around_it(
    rank: int, world_size: int, ranks: tuple[int, ...]
) -> None:
    world = World(rank=rank, world_size=world_size, local_world_size=world_size)
    assert world.neighbours == ranks


def test_torchruns_variables_are_read_as_they_stand() -> None:
    expected = World(
        rank=3,
        local_rank=1,
        node_rank=1,
        world_size=4,
        local_world_size=2,
        address="node-a",
        port=29511,
        store=None,
    )
    assert World.from_env(TORCHRUN) == expected


def test_only_the_mapping_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert World.from_env({}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_without_a_rank_or_a_size_there_is_no_world(name: str) -> None:
    assert World.from_env(without(TORCHRUN, name)) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_blank_rank_or_size_counts_as_missing(name: str) -> None:
    assert World.from_env(TORCHRUN | {name: " "}) is None


def test_a_rank_and_a_size_alone_mean_one_node() -> None:
    world = World.from_env({"RANK": "2", "WORLD_SIZE": "4"})
    assert world == World(rank=2, local_rank=2, node_rank=0, world_size=4, local_world_size=4)


def test_local_numbers_follow_from_the_size_of_a_node() -> None:
    world = World.from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert world is not None
    assert world.local_rank == 1
    assert world.node_rank == 1


def test_a_local_rank_of_another_node_needs_the_size_of_a_node() -> None:
    with pytest.raises(ConfigurationError, match="LOCAL_WORLD_SIZE"):
        World.from_env({"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
)
def test_a_variable_that_is_no_integer_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}='two'"):
        World.from_env(TORCHRUN | {name: "two"})


@pytest.mark.parametrize("rank", ["-1", "4"])
def test_a_rank_outside_the_job_is_refused(rank: str) -> None:
    env = without(TORCHRUN, "LOCAL_RANK", "GROUP_RANK") | {"RANK": rank}
    with pytest.raises(ConfigurationError, match=f"rank={rank}"):
        World.from_env(env)


@pytest.mark.parametrize("port", ["-1", "0", "65536"])
def test_a_port_that_cannot_be_is_refused(port: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MASTER_PORT={port}"):
        World.from_env(TORCHRUN | {"MASTER_PORT": port})


def test_blank_rendezvous_variables_count_as_missing() -> None:
    world = World.from_env(TORCHRUN | {"MASTER_ADDR": "", "MASTER_PORT": "", "FABRIC_STORE": ""})
    assert world is not None
    assert world.address == "127.0.0.1"
    assert world.port is None
    assert world.store is None


@pytest.mark.parametrize(
    "world",
    [
        World(),
        World(rank=1, local_rank=1, world_size=2, local_world_size=2, store="file:///tmp/meet"),
        World(
            rank=5,
            local_rank=2,
            node_rank=1,
            world_size=6,
            local_world_size=3,
            address="10.0.0.7",
            port=12345,
        ),
        World(
            rank=1, local_rank=0, node_rank=1, world_size=4, local_world_size=2, address="a", port=1
        ),
    ],
    ids=["alone", "store", "two nodes", "round the nodes"],
)
def test_a_world_survives_the_way_through_the_environment(world: World) -> None:
    assert World.from_env(world.to_env()) == world
    assert pickle.loads(pickle.dumps(world)) == world
