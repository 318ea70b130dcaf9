"""The commands ``python -m fabric_compat script.py`` and ``python -m fabric_compat -m module``."""

import os
import sys

from fabric.launchers.script import Script
from fabric_compat import installed


def main() -> None:
    """Run a script that imports Lightning Fabric.

    The processes that the script launches also find Lightning's names in this package.
    """
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m fabric_compat [-m] script.py ...")
    name = arguments[0]
    if not is_module and not os.path.exists(name):
        sys.exit(f"python -m fabric_compat {name}: there is no such file in {os.getcwd()!r}")
    os.environ["FABRIC_PRELOAD"] = installed.__name__
    run = Script(name=name, is_module=is_module, arguments=arguments)()
    run()


if __name__ == "__main__":
    main()
