"""Lightning Fabric's names, with Lightning's behavior, on torch-fabric.

``python -m fabric_compat script.py`` runs a script that imports ``lightning.fabric`` or
``lightning_fabric``. ``pytest -p fabric_compat.installed`` runs the tests of the script. In a new
script, import ``fabric_compat`` instead. Nothing in ``fabric`` imports this package.
"""

from fabric_compat import wrappers
from fabric_compat.fabric import Fabric
from fabric_compat.utilities import seed_everything
from fabric_compat.wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped", "seed_everything", "wrappers"]
