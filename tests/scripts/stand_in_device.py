"""A kind of hardware named ``npu`` for tests, as an extension of torch would add one.

Its tensors hold a tensor of the CPU, on which each operator runs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NUM_DEVICES = 2


class DeviceModule:
    """The module ``torch.npu``."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(index) for index in range(NUM_DEVICES)]
        self.was_cache_emptied = False

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, index: int = 0) -> Tensor:
        return self.generators[index].get_state()

    def get_rng_state_all(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    def set_rng_state(self, state: Tensor, index: int = 0) -> None:
        self.generators[index].set_state(state)

    def empty_cache(self) -> None:
        self.was_cache_emptied = True

    def max_memory_allocated(self) -> int:
        return 3 * 2**30


class DeviceTensor(Tensor):
    """A tensor on the stand-in, whose values are in a tensor of the CPU."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "DeviceTensor":
        return Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device="npu:0"
        )

    def __init__(self, values: Tensor) -> None:
        self.values_on_cpu = values

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None) -> Any:
        return run_on_cpu(operator, *args, **(kwargs or {}))


def run_on_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the tensors of the CPU behind its arguments."""
    cpu_args = tree_map(_to_cpu, args)
    cpu_kwargs = tree_map(_to_cpu, kwargs)
    device = kwargs.get("device")
    if device is not None:
        cpu_kwargs["device"] = "cpu"
    result = operator(*cpu_args, **cpu_kwargs)
    name = operator.name().partition(".")[0]
    if device is not None and torch.device(device).type == "cpu":
        return result
    if name.endswith("_"):
        return args[0]  # the operator has changed its first argument in place
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(_from_cpu, result)


def _to_cpu(value: Any) -> Any:
    return value.values_on_cpu if isinstance(value, DeviceTensor) else value


def _from_cpu(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value


def install() -> DeviceModule:
    """Add the hardware to torch in this process, and return its module."""
    module = DeviceModule()
    _setup_privateuseone_for_python_backend("npu", backend_module=module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(run_on_cpu, "PrivateUse1")
    # module.to() keeps the identity of parameters, as for tensors that are no subclass.
    torch.__future__.set_swap_module_params_on_conversion(True)
    module.library = library  # the fallback lasts as long as the library
    return module
