"""What launchers decide without ranks: commands, variables, start methods and serialization."""

import subprocess
import sys
import zipfile
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace

import cloudpickle
import psutil
import pytest
import torch

import fabric
import fabric_compat
from fabric.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    ConfigurationError,
    MissingDependencyError,
)
from fabric.launchers import LAUNCHERS, LaunchSpec, serialize
from fabric.launchers.base import is_interactive, node_worlds, notebook_start_method
from fabric.launchers.fork_server import ForkServer
from fabric.launchers.rank import is_secondary
from fabric.launchers.script import Script
from fabric.launchers.serialize import Call, dump_call, dump_result, load
from fabric.launchers.supervisor import never, rank_variables
from fabric.world import World

SCRIPTS = Path(__file__).parent / "scripts" / "launchers"


def main_module(file, name_in_spec=None):
    """Return a module ``__main__``, with a spec if Python would have run it with -m."""
    module = ModuleType("__main__")
    module.__file__ = file
    module.__spec__ = None
    if name_in_spec is not None:
        module.__spec__ = SimpleNamespace(name=name_in_spec)  # type: ignore[assignment]
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize(
    ("name", "is_module", "path"),
    [
        ("job.py", False, "job.py"),
        ("folder", False, "folder/__main__.py"),
        ("job", True, "job.py"),
        ("package", True, "package/__init__.py"),
        ("package", True, "package/__main__.py"),
        ("package.inner.job", True, "package/inner/__init__.py"),
        ("package.inner.job", True, "package/inner/job.py"),
        ("package.inner", True, "package/inner/__main__.py"),
    ],
)
def test_variables_of_libraries_are_found_in_the_files_that_a_rank_runs_first(
    tmp_path, name, is_module, path
):
    script_name = name if is_module else str(tmp_path / name)
    # A module is found in the initial working directory, in place of the present one.
    script = Script(
        name=script_name, is_module=is_module, arguments=[name], directory=str(tmp_path)
    )
    files = ["job.py", "folder/__main__.py", "package/__init__.py", "package/__main__.py"]
    files += ["package/inner/__init__.py", "package/inner/__main__.py", "package/inner/job.py"]
    for file in files:
        source = tmp_path / file
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("raise ImportError('a search imports nothing')\n")
    assert script.find_fork_hazard() == ""
    (tmp_path / path).write_text("os.environ['OMP_NUM_THREADS'] = '1'\n")
    hazard = script.find_fork_hazard()
    assert hazard.startswith(f"{tmp_path / path} has OMP_NUM_THREADS")
    missing = Script(name="no_such_package.job", is_module=True, arguments=[name])
    assert missing.find_fork_hazard() == ""


# What a library may do while it is imported, and a text of the reason why no rank is forked then.
HAZARDS = {
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": (
        "have left 2 threads"
    ),
    "": "",
    "import torch; torch.cuda.is_initialized = lambda: True": "have initialized CUDA",
    "raise ImportError": "the fork server ",  # has failed, or does not start
}
FIRST_HAZARD, *FURTHER_HAZARDS = HAZARDS
SOAK = [pytest.mark.slow, pytest.mark.soak]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize(
    "source",
    [FIRST_HAZARD, *(pytest.param(source, marks=SOAK) for source in FURTHER_HAZARDS)],
)
def test_ranks_are_not_forked_where_a_fork_would_differ(tmp_path, monkeypatch, source):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "library.py").write_text(source)
    hazard = ForkServer.with_modules(["library"]).find_hazard(while_waiting=never)
    assert bool(hazard) == bool(HAZARDS[source])
    assert HAZARDS[source] in hazard


def run(command, folder=None, text=None):
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize(
    ("main", "name", "command"),
    [
        (main_module("/w/b/../a.py"), "/w/a.py", ["-O", "/w/./a.py"]),
        (main_module("/w/m.py", "pkg.mod"), "pkg.mod", ["-m", "pkg.mod"]),
        (main_module("/w/__main__.py", "pkg.__main__"), "pkg", ["-m", "pkg"]),
        (main_module("/w/a.zip/__main__.py", "__main__"), "/w/a.zip", ["/w/a.zip"]),
    ],
    ids=["script", "module", "package", "zip"],
)
def test_the_script_of_a_process_follows_from_its_main_module_and_command(main, name, command):
    script = Script.of(main, ["python", *command, "--x"])
    assert script.name == name
    assert script.is_module == ("-m" in command)
    assert script.arguments == [command[-1], "--x"]


def test_prompts_and_notebooks_cannot_be_run_again(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert is_interactive()
    with pytest.raises(ConfigurationError, match="notebook or a prompt"):
        Script.of(main_module("/w/a.py"))


OPTIONS = """
import os, sys
from fabric.launchers import LAUNCHERS, LaunchSpec

flags = [sys.flags.optimize, sys.warnoptions, sys.flags.dev_mode, sys.stdout.write_through]
print(*flags, sys.argv[1:], flush=True)
del sys.argv[1:]
if "RANK" not in os.environ:
    LAUNCHERS["popen"].launch(None, (), {}, LaunchSpec(num_processes=1))
"""


def test_ranks_get_the_options_and_the_arguments_of_the_command_line(tmp_path):
    (tmp_path / "options.py").write_text(OPTIONS)
    command = ["-uO", "-W", "error", "-Xdev", "options.py", "-m", "--x"]
    process = run(command, folder=tmp_path)
    assert process.returncode == 0, process.stderr
    line = "1 ['default', 'error'] True True ['-m', '--x']"
    assert process.stdout.splitlines() == [line, line]


POPEN = "from fabric.launchers import *; LAUNCHERS['popen'].check(LaunchSpec(num_processes=2))"


@pytest.mark.parametrize(
    ("command", "text"), [(["-c", POPEN], None), (["-"], POPEN)], ids=["-c", "standard input"]
)
def test_code_without_a_file_cannot_be_run_again(command, text):
    process = run(command, text=text)
    assert "python -c` or standard input" in process.stderr
    assert 'launcher="forkserver"' in process.stderr


PROMPT = """
import os, sys
import psutil
from fabric import Fabric

def servers():
    pids = []
    for child in psutil.Process().children():
        while not child.cmdline():  # it has none for a moment, while it starts
            pass
        if "forkserver_main" in " ".join(child.cmdline()):
            pids.append(child.pid)
    return pids

Fabric(accelerator="cpu", devices=2, launcher="forkserver")
assert servers() == []
sys.ps1 = ">>> "
Fabric(accelerator="cpu", devices=1)
Fabric(accelerator="cpu", devices=2, launcher="spawn")
assert servers() == []
fabric = Fabric(accelerator="cpu", devices=2)
[server] = servers()
assert fabric.launch(lambda fabric: os.getppid()) == server
Fabric(accelerator="cpu", devices=2)
assert servers() == [server]
print(server)

del sys.ps1
def train(fabric):
    return fabric.all_reduce(fabric.global_rank, reduce_op="sum")
print(Fabric(accelerator="cpu", devices=2, launcher="forkserver").launch(train))
"""


def test_a_fabric_at_a_prompt_starts_the_server_of_its_ranks_and_leaves_none_behind():
    process = run(["-"], text=PROMPT)
    assert process.stderr == ""
    server, sum_of_ranks = map(int, process.stdout.split())
    assert not psutil.pid_exists(server)
    # A function of standard input is launched without a prompt, too.
    assert sum_of_ranks == 1


def test_a_module_is_run_again():
    process = run(["-W", "error", "-m", "job", "popen", "rank"], folder=SCRIPTS)
    assert process.stderr == ""
    assert process.stdout == "result 0\n"
    assert process.returncode == 0


@pytest.mark.slow
def test_an_archive_is_run_again(tmp_path):
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        archive.write(SCRIPTS / "job.py", "__main__.py")
        archive.write(SCRIPTS / "actions.py", "actions.py")
    process = run(["-Werror", "job.zip", "popen", "rank"], folder=tmp_path)
    assert process.stderr == ""
    assert process.stdout == "result 0\n"
    assert process.returncode == 0


def files_of_packages() -> list[str | None]:
    return [sys.modules[name].__file__ for name in ("fabric", "fabric_compat")]


def test_ranks_run_the_packages_of_the_process_that_starts_them(tmp_path, monkeypatch):
    # As in a checkout, which this process found in the current folder, beside an installed version.
    for name in ("fabric", "fabric_compat"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('the installed version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FABRIC_PRELOAD", "fabric_compat.installed")
    spec = LaunchSpec(num_processes=2, results="first")
    files = LAUNCHERS["spawn"].launch(files_of_packages, (), {}, spec)
    assert files == [fabric.__file__, fabric_compat.__file__]


@pytest.mark.parametrize(
    ("environ", "processes", "cores", "threads"),
    [({}, 2, 8, "4"), ({}, 3, 8, "2"), ({}, 8, 2, "1"), ({"OMP_NUM_THREADS": "5"}, 2, 8, "5")],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(environ, processes, cores, threads):
    world, *_ = node_worlds(processes)
    variables = rank_variables(environ, world, cores, "linux")
    assert variables["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("environ", "platform", "interface"),
    [({}, "linux", "lo"), ({}, "darwin", "lo0"), ({"GLOO_SOCKET_IFNAME": "ib0"}, "linux", "ib0")],
)
def test_gloo_stays_on_the_loopback_interface_unless_the_user_says_otherwise(
    environ, platform, interface
):
    variables = rank_variables(environ, World(), 1, platform)
    assert variables["GLOO_SOCKET_IFNAME"] == interface


def raised(error, during=None):
    """Raise an error, possibly while another error is handled, and return it with its context."""
    try:
        try:
            if during is not None:
                raise during
        finally:
            raise error
    except (ValueError, RuntimeError) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("x"), True),
        (CollectiveMismatchError("barrier()", "rank 1 does not come"), True),
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"
            ),
            True,
        ),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), True),
        (ValueError("timeout has to be positive"), False),
        (RuntimeError("shape mismatch"), False),
        (raised(RuntimeError("Connection closed by peer"), during=ValueError("bad loss")), False),
        (raised(ValueError("bad loss"), during=ConnectionError("gone")), True),
    ],
)
def test_secondary_failures_are_distinguished_from_causes(error, expected):
    assert is_secondary(error) is expected


# The function by which cloudpickle reduces the code of a function.
cloudpickle_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]


def dump_function(function):
    """Return the bytes with which a launch sends a function."""
    return dump_call(function, main_is_importable=False).data


@pytest.fixture
def no_cloudpickle(monkeypatch):
    monkeypatch.setattr(serialize, "has_cloudpickle", lambda: False)


def fail_on_import():
    pytest.fail("the import of cloudpickle takes as long as a launch")


def test_a_function_of_a_module_travels_by_name_without_an_import_of_cloudpickle(monkeypatch):
    monkeypatch.setattr(serialize, "has_cloudpickle", fail_on_import)
    packed, needs_main = dump_call(Call(torch.ones, (2,), {}), main_is_importable=False)
    assert not needs_main
    assert len(packed) < 200


@pytest.mark.usefixtures("no_cloudpickle")
def test_a_closure_without_cloudpickle_names_the_installation():
    with pytest.raises(MissingDependencyError, match=r'"torch-fabric\[notebook\]"'):
        dump_call(Call(lambda: None, (), {}), main_is_importable=True)


def test_a_function_of_a_notebook_without_cloudpickle_names_the_installation(monkeypatch):
    main = sys.modules["__main__"]
    exec("def typed(): return 1", main.__dict__)
    function = main.typed
    call = Call(function, (), {})
    try:
        _, needs_main = dump_call(call, main_is_importable=False)
        assert not needs_main
        monkeypatch.setattr(serialize, "has_cloudpickle", lambda: False)
        _, needs_main = dump_call(call, main_is_importable=True)
        assert needs_main
        with pytest.raises(MissingDependencyError, match="typed"):
            dump_call(call, main_is_importable=False)
    finally:
        del main.typed


def forget_file(code):
    """Reduce the code of a function as cloudpickle 3.1.3 does."""
    return cloudpickle_reduce_code(code.replace(co_filename="<dynamic-code>"))


@pytest.mark.parametrize("reduce_code", [cloudpickle_reduce_code, forget_file])
@pytest.mark.parametrize("dump", [dump_result, dump_function])
def test_a_function_that_travels_by_value_keeps_its_file(monkeypatch, reduce_code, dump):
    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, reduce_code)
    namespace = {}
    source = "def outer():\n    return lambda: 1 / 0\n"
    exec(compile(source, "/cells/7.py", "exec"), namespace)
    outer = load(dump(namespace["outer"]))
    assert outer.__code__.co_filename == "/cells/7.py"
    assert outer().__code__.co_filename == "/cells/7.py"
    assert outer().__code__.co_firstlineno == 2


def test_a_result_that_travels_by_value_contains_no_more_than_its_tensors():
    row = torch.ones(1000, 1000, requires_grad=True)[0]
    data = dump_result(lambda: row)
    assert len(data) < 10_000
    received_row = load(data)()
    assert torch.equal(received_row, row)
    assert not received_row.requires_grad


def generator():
    yield


@pytest.mark.parametrize("by_value", [False, True])
def test_an_argument_that_cannot_travel_is_named(monkeypatch, by_value):
    monkeypatch.setattr(serialize, "has_cloudpickle", lambda: by_value)
    call = Call(print, (), {"data": [1, 2, generator()]})
    with pytest.raises(ArgumentTypeError, match=r"kwargs\['data'\]\[2\] is a generator"):
        dump_call(call, main_is_importable=True)


@pytest.mark.parametrize(
    ("can_pickle_functions", "platform", "method"),
    [(True, "linux", "forkserver"), (False, "linux", "fork"), (False, "darwin", "forkserver")],
)
def test_a_notebook_gets_the_start_method_that_is_safe_there(
    can_pickle_functions, platform, method
):
    assert notebook_start_method(can_pickle_functions, platform) == method


def test_a_test_run_is_no_prompt():
    assert not is_interactive()


@pytest.mark.gpu
def test_fork_is_refused_once_cuda_is_initialized():
    torch.cuda.init()
    with pytest.raises(ConfigurationError, match="CUDA is initialized"):
        LAUNCHERS["fork"].check(LaunchSpec(num_processes=2, device_type="cpu"))
    LAUNCHERS["forkserver"].check(LaunchSpec(num_processes=2, device_type="cuda"))
