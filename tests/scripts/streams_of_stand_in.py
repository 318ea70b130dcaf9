"""Save and restore the random streams of the hardware of ``stand_in_device.py``."""

from unittest.mock import patch

import torch
from stand_in_device import DeviceModule, install

from fabric.seed import rng_state, set_rng_state, stream_digests


def draw(module: DeviceModule) -> list[float]:
    """Return a random number of the stream of each device."""
    numbers: list[float] = []
    for generator in module.generators:
        numbers.append(torch.rand((), generator=generator).item())
    return numbers


def restore_all_devices(module: DeviceModule) -> None:
    state = rng_state()
    drawn = draw(module)
    draw(module)
    set_rng_state(state)
    assert draw(module) == drawn


def restore_onto_another_current_device(module: DeviceModule) -> None:
    state = rng_state()
    state["npu"]["current"] = 1
    _, drawn = draw(module)
    set_rng_state(state)
    assert draw(module) == [drawn, drawn], "device 0 is current now, and device 1 was"


def restore_a_process_that_had_more_devices(module: DeviceModule) -> None:
    state = rng_state()
    state["npu"]["states"] *= 2
    drawn = draw(module)
    set_rng_state(state)
    assert draw(module) == drawn


def restore_a_process_that_had_fewer_devices(module: DeviceModule) -> None:
    state = rng_state()
    del state["npu"]["states"][1]
    drawn = draw(module)
    set_rng_state(state)
    again = draw(module)
    assert again[0] == drawn[0]
    assert again[1] != drawn[1]


def restore_a_process_that_had_no_devices(_: DeviceModule) -> None:
    state = rng_state()
    del state["npu"]
    before = stream_digests()
    set_rng_state(state)
    assert stream_digests() == before


def restore_a_process_that_had_devices_where_there_are_none(module: DeviceModule) -> None:
    state = rng_state()
    drawn_from_state = draw(module)
    with (
        patch.object(module, "is_available", return_value=False),
        patch.object(module, "device_count", return_value=0),
    ):
        set_rng_state(state)
    for number, number_from_state in zip(draw(module), drawn_from_state, strict=True):
        assert number != number_from_state, "the streams go on"


def compare_digests(module: DeviceModule) -> None:
    before = stream_digests()
    current, other = module.generators
    torch.rand((), generator=other)
    assert stream_digests() == before, "the stream of another device does not count"
    torch.rand((), generator=current)
    after = stream_digests()
    assert after.pop("npu") != before.pop("npu")
    assert after == before


def compare_digests_while_a_graph_is_captured(module: DeviceModule) -> None:
    with patch.object(module, "is_current_stream_capturing", create=True) as is_capturing:
        is_capturing.return_value = True
        assert "npu" not in stream_digests(), "the state of the stream cannot be read"
        is_capturing.return_value = False
        assert "npu" in stream_digests()


def main() -> None:
    module = install()
    restore_all_devices(module)
    restore_onto_another_current_device(module)
    restore_a_process_that_had_more_devices(module)
    restore_a_process_that_had_fewer_devices(module)
    restore_a_process_that_had_no_devices(module)
    restore_a_process_that_had_devices_where_there_are_none(module)
    compare_digests(module)
    compare_digests_while_a_graph_is_captured(module)


if __name__ == "__main__":
    main()
