"""The modules of torch for kinds of hardware, such as ``torch.cuda`` and ``torch.xpu``."""

from typing import Any, NamedTuple

import torch

__all__ = ["DeviceModule", "device_module", "initialized_device_module"]


def device_module(name: str) -> Any:
    """Return torch's module of a kind of hardware, or None if torch has none.

    Extensions of torch, such as ``torch_npu``, add their module when they are imported.

    Args:
        name: the ``type`` of a :class:`torch.device`, such as ``"xpu"``. Any other text is allowed.
    """
    try:
        device = torch.device(name)
    except RuntimeError:  # torch knows no such type
        return None
    if device.index is not None:  # "cuda:0" is a device, and no type
        return None
    return getattr(torch, name, None)


class DeviceModule(NamedTuple):
    """The hardware that a process uses beside the CPU.

    Attributes:
        name: the ``type`` of its devices, such as ``"cuda"``.
        module: torch's module for it, such as ``torch.cuda``.
    """

    name: str
    module: Any


def initialized_device_module() -> DeviceModule | None:
    """Return the hardware that this process has used beside the CPU, or None.

    Hardware that was not used stays uninitialized.
    """
    device = torch.accelerator.current_accelerator()  # None if torch was built for CPUs alone
    if device is None:
        return None
    module = device_module(device.type)
    # torch.mps has neither is_initialized() nor the functions for which callers ask, such as
    # get_rng_state_all(). So MPS counts as not initialized.
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return DeviceModule(device.type, module)
