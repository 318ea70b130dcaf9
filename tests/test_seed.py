"""Seeding, and the state of the random streams."""

import io
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import product, starmap
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fabric.errors import ConfigurationError
from fabric.seed import (
    RandomStreams,
    WorkerSeeding,
    rng_state,
    sample_generator,
    seed_everything,
    set_rng_state,
    stream_digests,
)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def test_same_seed_gives_the_streams_of_the_libraries_own_seeding() -> None:
    assert seed_everything(42) == 42
    ours = draw()
    random.seed(42)
    numpy.random.seed(42)
    torch.manual_seed(42)
    assert draw() == ours


def test_ranks_share_their_streams_by_default() -> None:
    drawn = []
    for rank in range(3):
        seed_everything(1, rank=rank)
        drawn.append(draw())
    assert drawn[0] == drawn[1] == drawn[2]


def test_per_rank_streams_are_all_distinct_and_rank_0_has_the_plain_ones() -> None:
    values: set[float] = set()
    for seed in range(10):
        for rank in range(10):
            assert seed_everything(seed, rank=rank, per_rank=True) == seed
            values.update(draw())
    assert len(values) == 300
    seed_everything(3, rank=0, per_rank=True)
    ours = draw()
    seed_everything(3)
    assert draw() == ours


def test_without_a_seed_a_call_chooses_a_new_seed_that_repeats_its_numbers() -> None:
    seed = seed_everything()
    ours = draw()
    assert 0 <= seed < 2**32
    seed_everything(seed)
    assert draw() == ours
    assert len({seed_everything() for _ in range(5)}) > 1


def test_largest_seed_and_numpy_integers_are_taken() -> None:
    assert seed_everything(2**32 - 1) == 2**32 - 1
    assert type(seed_everything(numpy.int64(7))) is int


@pytest.mark.parametrize(
    ("seed", "error"),
    [(-1, ConfigurationError), (2**32, ConfigurationError), (1.0, TypeError), ("1", TypeError)],
)
def test_seed_that_cannot_be_used_is_refused(seed: Any, error: type[Exception]) -> None:
    before = rng_state()
    with pytest.raises(error):
        seed_everything(seed)
    assert torch.equal(rng_state()["torch"], before["torch"])


def draw_with_normals() -> tuple[float, float, tuple[float, float, float]]:
    return random.gauss(0, 1), numpy.random.randn(), draw()


def test_state_goes_through_a_weights_only_file_and_back() -> None:
    # Both functions draw a pair and keep the second number for the next call.
    random.gauss(0, 1)
    numpy.random.randn()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = draw_with_normals()
    seed_everything(999)
    set_rng_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert draw_with_normals() == expected


def test_state_of_something_else_is_refused_before_a_change() -> None:
    before = random.getstate()
    with pytest.raises(KeyError, match="torch"):
        set_rng_state({"python": (3, (0,) * 625, None)})
    assert random.getstate() == before


def test_state_without_numpy_leaves_numpy_alone() -> None:
    state = rng_state()
    del state["numpy"]
    numpy.random.seed(5)
    set_rng_state(state)
    assert numpy.random.rand() == numpy.random.RandomState(5).rand()


def test_states_of_hardware_that_this_process_does_not_have_are_ignored() -> None:
    state = rng_state()
    expected = draw()
    for name in ("cuda", "npu"):
        state.setdefault(name, {"current": 0, "states": [torch.zeros(16, dtype=torch.uint8)]})
    set_rng_state(state)
    assert draw() == expected


def test_streams_of_the_devices_of_an_extension_are_restored_and_compared() -> None:
    # In a process of its own, since hardware cannot be taken away from torch again.
    script = Path(__file__).parent / "scripts" / "streams_of_stand_in.py"
    subprocess.run([sys.executable, "-W", "error", script], check=True, timeout=150)


@pytest.mark.parametrize(
    ("name", "draw_number"),
    [("python", random.random), ("numpy", numpy.random.rand), ("torch", lambda: torch.rand(()))],
)
def test_the_digest_of_a_stream_changes_with_the_stream_alone(
    name: str, draw_number: Callable[[], object]
) -> None:
    before = stream_digests()
    assert stream_digests() == before
    draw_number()
    after = stream_digests()
    assert after.pop(name) != before.pop(name)
    assert after == before


def test_a_process_without_numpy_saves_no_state_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert "numpy" not in rng_state()
    assert "numpy" not in stream_digests()


def test_seeding_does_not_import_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    seed_everything(1, rank=1, per_rank=True)
    set_rng_state(rng_state())
    assert "numpy" not in sys.modules


def test_streams_that_differ_are_restored_and_equal_streams_go_on() -> None:
    streams = RandomStreams(("python", "torch"))
    saved = streams.state()
    random.seed(77)
    changed = streams.state()
    random.random()
    torch.rand(())
    streams.restore_global_streams(saved, unless=changed)
    assert random.getstate() == saved["python"]
    assert not torch.equal(torch.get_rng_state(), saved["torch"])
    random.random()
    streams.restore_global_streams(saved, unless=saved)
    assert random.getstate() != saved["python"]


def test_generators_are_restored_and_go_on_without_a_saved_state() -> None:
    generators = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))

    def draw_from_generators() -> list[float]:
        return [torch.rand((), generator=generator).item() for generator in generators]

    streams = RandomStreams(generators=generators)
    saved = streams.state()
    first = draw_from_generators()
    second = draw_from_generators()
    streams.restore(saved)
    assert draw_from_generators() == first
    streams.restore({})
    assert draw_from_generators() == second


def test_random_streams_are_true_if_there_are_any() -> None:
    assert not RandomStreams()
    assert RandomStreams(("python",))
    assert RandomStreams(generators=(torch.Generator(),))


def test_the_stream_of_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    def draw_for_sample(seed: Any, epoch: Any, index: int) -> float:
        generator = sample_generator(seed, epoch, index)
        return torch.rand((), dtype=torch.float64, generator=generator).item()

    samples = list(product((-1, 0, 2**70), range(5), (-1, 0, 1, 11, 10**18)))
    assert len(set(starmap(draw_for_sample, samples))) == len(samples)
    seed_everything(1)
    drawn = draw_for_sample(3, 1, 4)
    shared = draw()
    seed_everything(1)
    assert draw() == shared
    assert draw_for_sample(numpy.int64(3), torch.tensor(1), 4) == drawn
    with pytest.raises(TypeError):
        sample_generator(0.5, 0, 0)  # pyright: ignore[reportArgumentType]


def test_worker_seeding_mixes_in_the_rank_and_then_calls_the_users_function() -> None:
    values: list[float] = []
    for rank in range(3):
        for worker_id in (10, 11):
            seed_everything(worker_id)
            seeding = pickle.loads(pickle.dumps(WorkerSeeding(rank, record_worker)))
            seeding(worker_id)
            values += draw()
    assert len(set(values)) == 18
    seed_everything(10)
    assert values[:3] == list(draw())
    assert WORKER_IDS == [10, 11] * 3


WORKER_IDS: list[int] = []


def record_worker(worker_id: int) -> None:
    WORKER_IDS.append(worker_id)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_state_includes_the_stream_of_the_cuda_device() -> None:
    seed_everything(4)
    torch.rand(3, device="cuda")
    state = rng_state()
    expected = torch.rand(3, device="cuda")
    seed_everything(5)
    set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
