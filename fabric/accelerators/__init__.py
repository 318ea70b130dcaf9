"""Which hardware a job runs on: one stateless class per kind of device."""

from fabric.accelerators.base import Accelerator
from fabric.accelerators.cpu import CPUAccelerator
from fabric.accelerators.cuda import CUDAAccelerator
from fabric.accelerators.mps import MPSAccelerator

__all__ = ["Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator"]
