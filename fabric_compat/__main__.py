"""``python -m fabric_compat script.py ...`` or ``python -m fabric_compat -m module ...``."""

import os
import sys

from fabric.launchers.script import Script
from fabric_compat import installed


def main() -> None:
    """Run a script that imports Lightning Fabric, in this process and in those that it launches."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    script = arguments[is_module : is_module + 1]
    if not script or script[0].startswith("-"):
        sys.exit("usage: python -m fabric_compat [-m] script.py ...")
    if not is_module and not os.path.exists(script[0]):
        sys.exit(f"python -m fabric_compat {script[0]}: there is no such file in {os.getcwd()!r}")
    os.environ["FABRIC_PRELOAD"] = installed.__name__
    Script(name=script[0], is_module=is_module, arguments=arguments[is_module:])()()


if __name__ == "__main__":
    main()
