"""The time from launching two ranks to the end of their first collective, for two launches.

The module is also a script: ``launch.py CONTESTANT METHOD`` prints the seconds of a first and of a
second launch from one process, which has imported torch and the library before. ``METHOD`` is
``script`` in ranks that a launcher starts with a command.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 2
# The highest ratio of fabric's time to torch's, by start method.
METHODS = {"spawn": 1.10, "fork": None, "forkserver": None, "popen": 1.10}


def arrived() -> float:
    """Return the time after a first collective, on a clock that all processes share."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    return time.monotonic()


# -- Launches, which return the time after the first collective of the ranks. --


def raw(method: str) -> Callable[[], float]:
    import torch.multiprocessing as processes

    def launch() -> float:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (folder, free_port())
            processes.start_processes(raw_rank, arguments, nprocs=RANKS, start_method=method)
            return float(Path(folder, "arrived").read_text())

    return launch


def raw_rank(rank: int, folder: str, port: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    when = arrived()
    if rank == 0:
        Path(folder, "arrived").write_text(repr(when))
    dist.destroy_process_group()


def ours(method: Any) -> Callable[[], float]:
    from fabric import Fabric

    def launch() -> float:
        with Fabric(accelerator="cpu", devices=RANKS, strategy="ddp", launcher=method) as fabric:
            return fabric.launch(our_rank)

    return launch


def our_rank(fabric: Any) -> float:
    import torch

    fabric.all_reduce(torch.ones(1))
    return time.monotonic()


def lightning(method: Any) -> Callable[[], float]:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra
    from lightning_fabric.strategies import DDPStrategy  # pyright: ignore[reportMissingImports]  # an extra

    def launch() -> float:
        strategy = DDPStrategy(start_method=method)
        return Fabric(accelerator="cpu", devices=RANKS, strategy=strategy).launch(lightning_rank)

    return launch


def lightning_rank(fabric: Any) -> float:
    import torch

    fabric.all_reduce(torch.ones(1))
    return time.monotonic()


def accelerate(method: str) -> Callable[[], float]:
    from accelerate import (  # pyright: ignore[reportMissingImports]  # an extra
        Accelerator,  # noqa: F401
        debug_launcher,
    )

    def launch() -> float:
        with tempfile.TemporaryDirectory() as folder:
            debug_launcher(accelerate_rank, (folder,), num_processes=RANKS)
            return float(Path(folder, "arrived").read_text())

    return launch


def accelerate_rank(folder: str) -> None:
    import torch
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    accelerator = Accelerator(cpu=True)
    accelerator.reduce(torch.ones(1))
    if accelerator.process_index == 0:
        Path(folder, "arrived").write_text(repr(time.monotonic()))


def script(contestant: str) -> None:
    """Run as a rank that a launcher started, and print the time of arrival on rank 0."""
    if contestant == "raw":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        when = arrived()
        first = dist.get_rank() == 0
        dist.destroy_process_group()
    elif contestant == "accelerate":
        import torch
        from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

        accelerator = Accelerator(cpu=True)
        accelerator.reduce(torch.ones(1))
        when = time.monotonic()
        first = accelerator.process_index == 0
        accelerator.end_training()
    else:
        if contestant == "fabric":
            from fabric import Fabric
        else:
            from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

        import torch

        options: dict[str, Any] = {"launcher": "popen"} if contestant == "fabric" else {}
        fabric: Any = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp", **options)
        fabric.launch()
        fabric.all_reduce(torch.ones(1))
        when = time.monotonic()
        first = fabric.global_rank == 0
    if first:
        print(json.dumps([when]), flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- Measurements. --

LAUNCHES = {"raw": raw, "fabric": ours, "lightning-fabric": lightning, "accelerate": accelerate}


def run_script(contestant: str) -> float:
    """Return the seconds from the command to the first collective of the ranks, with imports."""
    file = [__file__, contestant, "script"]
    torchrun = ["torch.distributed.run", f"--nproc_per_node={RANKS}", "--master_addr=127.0.0.1"]
    accelerate_launch = ["--cpu", f"--num_processes={RANKS}", f"--main_process_port={free_port()}"]
    launchers = {
        "raw": ["-m", *torchrun, f"--master_port={free_port()}"],
        "accelerate": ["-m", "accelerate.commands.launch", *accelerate_launch, "--num_machines=1"],
    }
    launcher = launchers.get(contestant, [])
    began = time.monotonic()
    return last_line([sys.executable, "-W", "ignore", *launcher, *file])[0] - began


def measure(contestant: str, method: str) -> dict[str, float]:
    """Return the numbers of one start method."""
    if method == "popen":
        return {"first": run_script(contestant)}
    first, *second = last_line([sys.executable, "-W", "ignore", __file__, contestant, method])
    results = {"first": first}
    if second:
        results["again"] = second[0]
    return results


def last_line(command: list[str]) -> list[float]:
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    # With bytecode, as after an installation. Otherwise each process would compile the sources.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # torchrun leaves a folder for logs in the folder for temporary files.
    with tempfile.TemporaryDirectory() as folder:
        environment["TMPDIR"] = folder
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=200
        )
    # Libraries print to stdout, too.
    results = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return json.loads(results[-1])


def main() -> None:
    contestant, method = sys.argv[1:]
    if method == "script":
        script(contestant)
        return
    import torch  # noqa: F401 - the time of its import is not that of a launch

    launch = LAUNCHES[contestant](method)
    times = []
    for _ in range(2):
        began = time.monotonic()
        times.append(launch() - began)
    print(json.dumps(times))


def cases() -> list[Any]:
    # Late: this module is a script too, whose ranks would otherwise import more than they need.
    from benchmarks.framework import Case, Measure, Row

    def preparing(contestant: str, method: str) -> Callable[[bool], Measure]:
        return lambda quick: lambda: measure(contestant, method)

    def has(contestant: str, method: str) -> bool:
        return contestant != "accelerate" or method in ("fork", "popen")

    return [
        Case(
            name=f"launch-{method}",
            title=f"From launch to the end of the first collective on two ranks, {method}",
            rows={
                "first": Row("s", "ratio", budget),
                **({} if method == "popen" else {"again": Row("s", "ratio")}),
            },
            contestants={name: preparing(name, method) for name in LAUNCHES if has(name, method)},
            rounds=4,
            notes={"accelerate": "on a CPU it launches functions by fork alone"},
        )
        for method, budget in METHODS.items()
    ]


if __name__ == "__main__":
    main()
else:
    CASES = cases()
