"""Importing a library, beyond importing torch."""

import os
import subprocess
import sys
from collections.abc import Callable

from benchmarks.framework import CONTESTANTS, OURS, Case, Measure, Row

# The imports of a script that uses the library.
STATEMENTS = {
    "raw": "pass",
    OURS: "from fabric import Fabric",
    "lightning-fabric": "from lightning_fabric import Fabric",
    "accelerate": "from accelerate import Accelerator",
}
# Garbage collection over all that torch has loaded takes 0.1 s. A collection before the measurement
# makes another during the measurement unlikely.
SCRIPT = """
import gc, sys, time
import torch
gc.collect()
modules, began = set(sys.modules), time.perf_counter()
{}
print(1e3 * (time.perf_counter() - began), len(set(sys.modules) - modules))
"""


def prepare(contestant: str) -> Callable[[bool], Measure]:
    def prepared(quick: bool) -> Measure:
        return lambda: measure(STATEMENTS[contestant])

    return prepared


def measure(statement: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(statement)]
    # With bytecode, as after an installation. Otherwise each import would compile the sources.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    milliseconds, modules = done.stdout.split()[-2:]
    return {"time": float(milliseconds), "modules": int(modules)}


CASES = [
    Case(
        name="import",
        title="Import, beyond torch's",
        rows={"time": Row("ms", "difference", 50), "modules": Row("modules", "difference")},
        contestants={name: prepare(name) for name in CONTESTANTS},
        rounds=5,
    )
]
