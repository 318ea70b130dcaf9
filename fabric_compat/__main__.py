"""The commands ``python -m fabric_compat script.py``, ``-m module`` and ``run script.py``."""

import argparse
import os
import sys

from fabric import cli
from fabric.launchers.script import Script
from fabric_compat import installed

# The options of Lightning's `fabric run`, besides --devices.
_OPTIONS = (
    "accelerator",
    "strategy",
    "num-nodes",
    "node-rank",
    "main-address",
    "main-port",
    "precision",
)


def main() -> None:
    """Run a script that imports Lightning Fabric.

    The processes that the script launches also find Lightning's names in this package.
    """
    # Every rank that fabric launches imports the module of this name before the script.
    os.environ["FABRIC_PRELOAD"] = installed.__name__
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        sys.argv[1:] = _fabric_command(arguments[1:])
        sys.exit(cli.main())
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m fabric_compat [run | -m] script.py ...")
    name = arguments[0]
    if not is_module and not os.path.exists(name):
        sys.exit(f"python -m fabric_compat {name}: there is no such file in {os.getcwd()!r}")
    # As in sys.argv, the name of the script is the first of its arguments.
    script = Script(name=name, is_module=is_module, arguments=arguments)
    run = script()  # prepares this process, and returns the function that runs the script
    run()


def _fabric_command(arguments: list[str]) -> list[str]:
    """Return the arguments of ``fabric`` for the arguments of Lightning's ``fabric run``.

    Lightning's options may have underscores, and may come after the name of the script. Without
    ``--devices`` there is one process.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--devices", default="1")
    for option in _OPTIONS:
        parser.add_argument(f"--{option}", f"--{option.replace('-', '_')}")
    options, script_and_arguments = parser.parse_known_args(arguments)
    command = ["run"]
    for name, value in vars(options).items():
        if value is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    return command + script_and_arguments


if __name__ == "__main__":
    main()
