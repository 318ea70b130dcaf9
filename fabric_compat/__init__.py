"""Lightning Fabric's names and their meaning there, on torch-fabric.

``python -m fabric_compat script.py`` runs a script whose imports are ``lightning.fabric`` or ``lightning_fabric``;
``pytest -p fabric_compat.installed`` its tests. A script of your own imports ``fabric_compat`` in their place. Nothing
in ``fabric`` imports this package.
"""

from fabric_compat import wrappers
from fabric_compat.fabric import Fabric
from fabric_compat.utilities import seed_everything
from fabric_compat.wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped", "seed_everything", "wrappers"]
