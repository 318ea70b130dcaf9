"""After a fault in a notebook, the cell ends with the error of the rank and the kernel lives on."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from jupyter_client import BlockingKernelClient, KernelManager

from tests.faults.jobs import assert_no_files_left, within
from tests.faults.test_ranks import EXPECTED

DEADLINE = 150
DEFINITIONS = """
from fabric import Fabric
from tests.faults import train

def job(fabric, fault):
    train.job(fabric, fault)

def total(fabric):
    return fabric.all_reduce(fabric.global_rank + 1, reduce_op="sum")

def launch(*call):
    return Fabric(accelerator="cpu", devices=2).launch(*call)
"""


class Notebook:
    """A kernel, and the text that its last cell has written."""

    def __init__(
        self, manager: KernelManager, client: BlockingKernelClient, directory: Path
    ) -> None:
        self.manager = manager
        self.directory = directory
        self._client = client
        self._request = ""
        self.written = ""

    def run(self, cell: str, until: str = "", typed: Sequence[str] = ()) -> dict:
        """Run a cell and return its reply.

        With ``until``, return ``{}`` as soon as the written text matches this pattern. The lines
        ``typed`` answer the requests of the cell for input.
        """
        self.written = ""
        # By default a failed cell aborts the cells that arrive before the kernel has tidied up. The
        # next cell of a test may be one of them.
        self._request = self._client.execute(cell, stop_on_error=False)
        for line in typed:
            self._client.get_stdin_msg(timeout=DEADLINE / 3)
            self._client.input(line)
        while until == "" or not re.search(until, self.written):
            message = self._client.get_iopub_msg(timeout=DEADLINE)
            if not self._answers(message):
                continue
            if message["msg_type"] == "stream":
                self.written += message["content"]["text"]
            if message["content"].get("execution_state") == "idle":
                break
        if until:
            return {}
        return self.reply()

    def reply(self) -> dict:
        """Wait for the end of the cell that was begun last, and return its reply."""
        while True:
            message = self._client.get_shell_msg(timeout=DEADLINE)
            if self._answers(message):
                return message["content"]

    def _answers(self, message: dict) -> bool:
        return message["parent_header"].get("msg_id") == self._request

    def numbers(self, pattern: str) -> list[float]:
        return [float(number) for number in re.findall(pattern, self.written)]

    def assert_next_launch_works(self) -> None:
        """Check that another launch works, and that the last one left no file."""
        assert_no_files_left(self.directory)
        reply = self.run("assert launch(total) == 3")
        assert reply["status"] == "ok", reply


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    directory = tmp_path_factory.mktemp("notebook")
    root = str(Path(__file__).parents[2])
    variables = dict(os.environ)
    variables.pop("PYTEST_CURRENT_TEST", None)
    variables |= {"TMPDIR": str(directory), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    manager = KernelManager()
    manager.start_kernel(env=variables, cwd=root)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE)
        notebook = Notebook(manager, client, directory)
        # The first launch starts the server from which ranks are forked, which takes a while.
        assert notebook.run(DEFINITIONS + "launch(total)")["status"] == "ok"
        yield notebook
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


SLOW_FAULTS = [
    pytest.param(fault, marks=pytest.mark.slow) for fault in EXPECTED if fault != "killed"
]


@pytest.mark.parametrize("fault", ["killed", *SLOW_FAULTS])
def test_a_cell_ends_with_the_error_of_its_rank_and_the_next_one_works(notebook, fault):
    expected = EXPECTED[fault]
    reply = notebook.run(f"launch(job, {fault!r})")
    [since] = notebook.numbers(r"fault ([\d.]+)")
    assert time.monotonic() - since < within()
    assert reply["ename"] == "RankFailedError"
    first, *_ = reply["evalue"].splitlines()
    assert first.startswith("rank 1 of 2 "), reply["evalue"]
    assert expected.outcome in first
    assert reply["evalue"].rstrip().endswith(expected.last_words)
    notebook.assert_next_launch_works()


FAILING = """
import torch
from torch import nn

class Net(nn.Linear):
    def forward(self, batch):
        hidden = super().forward(batch)
        raise ValueError(hidden.shape)  # in the model

def fails(fabric, where):
    if where == "input":
        input("name? ")  # at the keyboard
    if where == "breakpoint":
        breakpoint()  # in the debugger
    if where == "fabric":
        fabric.all_reduce({"hot": True})  # in a collective
    model = fabric.setup(Net(2, 1))
    model(torch.ones(4, 2))  # in the loop
"""


@pytest.mark.parametrize(
    ("where", "lines", "end"),
    [
        ("model", ["in the loop", "in the model"], "\nValueError: torch.Size([4, 1])"),
        ("fabric", ["in a collective"], "\n  booleans have no mean\n"),
        ("input", ["at the keyboard"], "UsageError: input() on rank "),
        ("breakpoint", ["in the debugger"], "UsageError: breakpoint() on rank "),
    ],
)
def test_an_error_in_a_rank_shows_the_lines_of_the_cells_and_few_of_ours(
    notebook, where, lines, end
):
    assert notebook.run(FAILING)["status"] == "ok"
    shown = "\n".join(notebook.run(f"launch(fails, {where!r})  # here")["traceback"])
    lines_of_cells = re.findall(r"  Cell In\[\d+\], line \d+, in .+\n    .+  # (.+)\n", shown)
    assert lines_of_cells == ["here", *lines]
    assert "\nfabric.errors.RankFailedError: rank " in shown
    assert end in shown
    assert f"{os.sep}fabric{os.sep}" not in shown
    assert "_call_impl" not in shown


def test_a_mistake_in_a_cell_shows_the_line_of_the_cell_alone(notebook):
    cell = "fabric = Fabric(accelerator='cpu', devices=2)\nfabric.setup(Net(2, 1))  # here"
    shown = "\n".join(notebook.run(cell)["traceback"])
    assert re.findall(r"  (Cell|File) .+\n    .+# (.+)\n", shown) == [("Cell", "here")]
    assert "\nfabric.errors.UsageError: fabric.setup" in shown
    assert f"{os.sep}fabric{os.sep}" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("state", ["waits", "trains", "waits_in_cpp", "holds_the_lock"])
def test_the_stop_button_ends_the_ranks_and_not_the_kernel(notebook, state):
    notebook.run(f"launch(job, {state!r})", until=r"(?s)ready.*ready \d \d+\n")
    ranks = [psutil.Process(int(pid)) for pid in notebook.numbers(r"ready \d (\d+)")]
    since = time.monotonic()
    notebook.manager.interrupt_kernel()
    reply = notebook.reply()
    assert reply["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - since < within()
    assert f"{os.sep}fabric{os.sep}_fabric.py" not in "\n".join(reply["traceback"])
    assert not any(rank.is_running() for rank in ranks)
    notebook.assert_next_launch_works()


PLOT = """
from fabric.loggers import CSVLogger
from fabric.plotting import plot

logger = CSVLogger({folder!r})
logger.log_metrics({{"loss": 1.0}}, 0)
logger.close()
picture = plot({folder!r})
png, _ = get_ipython().display_formatter.format(picture)
assert png["image/png"], png
"""


def test_a_cell_shows_a_plot_as_a_picture(notebook, tmp_path):
    reply = notebook.run(PLOT.format(folder=str(tmp_path / "run")))
    assert reply["status"] == "ok", reply["evalue"]


DEBUGGED = """
import os, random, time
import torch
import torch.distributed as dist
from torch import nn
from fabric import Fabric

def train(fabric, model, fault=""):
    fabric.seed_everything(5)
    prepared, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    secret = fabric.global_rank + 40
    if fault == "prompt" and fabric.global_rank == 0:
        print("hello", input("name? "))
    if fault == "prompt":
        breakpoint()
    for _ in range(2):
        loss = prepared(torch.ones(2, 4)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if fault == f"rank {fabric.global_rank}":
        raise ValueError(f"the secret is {secret}")  # here
    if fault == "stop" and fabric.global_rank == 0:
        print("ready", flush=True)
        fabric.barrier()  # rank 1 never comes
    while fault in ("stop", "rank 1"):
        time.sleep(0.01)
    return os.getpid(), loss.item()

def state():
    return [dict(os.environ), random.getstate(), torch.get_rng_state().tolist(),
        torch.get_num_threads(), dist.is_initialized(), sorted(dict(model.named_parameters()))]

fabric = Fabric(accelerator="cpu", devices=2, strategy={strategy!r}, check_training=False)
model = nn.Linear(4, 1)
weight = model.weight.detach().clone()
before = state()
"""
UNCHANGED = """
assert state() == before
assert type(model.weight) is nn.Parameter and torch.equal(model.weight, weight)
first, second = fabric.launch(train, model, debug=0, return_all=True)
assert first[0] == os.getpid() != second[0]
assert fabric.launch(train, model)[1] == first[1]
assert state() == before
"""


def assert_kernel_is_unchanged(notebook: Notebook) -> None:
    reply = notebook.run(UNCHANGED)
    assert reply["status"] == "ok", reply["evalue"]
    assert_no_files_left(notebook.directory)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", pytest.param("fsdp", marks=[pytest.mark.slow, pytest.mark.soak])],
)
def test_rank_0_can_be_debugged_in_the_kernel(notebook, strategy):
    cell = DEBUGGED.replace("{strategy!r}", repr(strategy))
    assert notebook.run(cell)["status"] == "ok"

    # The keyboard and the debugger of the kernel are those of rank 0.
    typed = ["Ada", "p 'the secret', secret", "secret = 50", "continue"]
    reply = notebook.run("fabric.launch(train, model, 'prompt', debug=0)", typed=typed)
    assert reply["status"] == "ok", reply["evalue"]
    assert "hello Ada" in notebook.written
    assert "('the secret', 40)" in notebook.written
    assert_kernel_is_unchanged(notebook)

    # After an error of rank 0, the debugger shows the variables of the function.
    reply = notebook.run("fabric.launch(train, model, 'rank 0', debug=0)")
    assert reply["ename"] == "ValueError"
    shown = "\n".join(reply["traceback"])
    assert "# here" in shown
    assert f"{os.sep}launchers{os.sep}" not in shown
    reply = notebook.run("%debug", typed=["p 'post mortem', secret, fault", "quit"])
    assert "('post mortem', 40, 'rank 0')" in notebook.written
    assert_kernel_is_unchanged(notebook)

    # An error of another rank ends rank 0, which is in a loop.
    reply = notebook.run("fabric.launch(train, model, 'rank 1', debug=0)")
    assert reply["ename"] == "RankFailedError"
    assert reply["evalue"].startswith("rank 1 of 2 failed (exit code 1)")
    assert reply["evalue"].rstrip().endswith("ValueError: the secret is 41")
    assert_kernel_is_unchanged(notebook)

    # So does the stop button, while rank 0 waits in C++ code.
    notebook.run("fabric.launch(train, model, 'stop', debug=0)", until=r"(?m)^ready$")
    since = time.monotonic()
    notebook.manager.interrupt_kernel()
    assert notebook.reply()["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - since < within()
    assert_kernel_is_unchanged(notebook)
