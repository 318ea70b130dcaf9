"""The names of the modules ``lightning.fabric`` and ``lightning_fabric``.

This module is not the package ``fabric_compat``, in whose folder the import system would find
modules that Lightning Fabric does not have.
"""

import os

from fabric_compat import Fabric, is_wrapped, seed_everything, wrappers
from fabric_compat.utilities import disable_possible_user_warnings

__all__ = ["Fabric", "is_wrapped", "seed_everything"]

# As in Lightning: torch.cuda.is_available() in the script then does not start CUDA, which processes
# that are forked later could not use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
