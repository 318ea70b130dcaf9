"""The pure parts of the launchers: command lines, variables, detection, and what travels how."""

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fabric.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    ConfigurationError,
    MissingDependencyError,
)
from fabric.launchers import LAUNCHERS, LaunchSpec, serialize
from fabric.launchers.base import is_interactive, node_worlds, notebook_start_method
from fabric.launchers.rank import is_secondary
from fabric.launchers.script import Script
from fabric.launchers.serialize import Call, dump_call
from fabric.launchers.supervisor import rank_variables
from fabric.world import World

SCRIPTS = Path(__file__).parent / "scripts" / "launchers"
pytestmark = pytest.mark.timeout(60)


def module(file, spec=None):
    made = ModuleType("__main__")
    made.__file__ = file
    made.__spec__ = SimpleNamespace(name=spec) if spec else None  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("main", "name", "command"),
    [
        (module("/w/b/../a.py"), "/w/a.py", ["-O", "/w/./a.py"]),
        (module("/w/m.py", "pkg.mod"), "pkg.mod", ["-m", "pkg.mod"]),
        (module("/w/__main__.py", "pkg.__main__"), "pkg", ["-m", "pkg"]),
        (module("/w/a.zip/__main__.py", "__main__"), "/w/a.zip", ["/w/a.zip"]),
    ],
    ids=["script", "module", "package", "zip"],
)
def test_the_script_of_a_process_is_found(main, name, command):
    script = Script.of(main, ["python", *command, "--x"])
    assert (script.name, script.is_module) == (name, "-m" in command)
    assert script.arguments == [command[-1], "--x"]


def test_prompts_and_notebooks_cannot_be_run_again(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert is_interactive()
    with pytest.raises(ConfigurationError, match="notebook or a prompt"):
        Script.of(module("/w/a.py"))


OPTIONS = """
import sys
from fabric.launchers import LAUNCHERS, LaunchSpec
print(sys.flags.optimize, sys.warnoptions, sys.flags.dev_mode, sys.stdout.write_through, sys.argv[1:], flush=True)
del sys.argv[1:]
LAUNCHERS["popen"].launch(None, (), {}, LaunchSpec(num_processes=1)) if "RANK" not in __import__("os").environ else 0
"""


def test_ranks_get_the_options_and_the_arguments_of_the_command_line(tmp_path):
    (tmp_path / "options.py").write_text(OPTIONS)
    command = [sys.executable, "-uO", "-W", "error", "-Xdev", "options.py", "-m", "--x"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 1
    assert done.stdout.count("1 ['default', 'error'] True True ['-m', '--x']") == 2


def test_code_on_the_command_line_cannot_be_run_again():
    code = "from fabric.launchers import *; LAUNCHERS['popen'].check(LaunchSpec(num_processes=2))"
    for arguments, text in ((["-c", code], None), (["-"], code)):
        done = subprocess.run(
            [sys.executable, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert "python -c` or standard input" in done.stderr
        assert 'launcher="forkserver"' in done.stderr


def test_a_function_of_standard_input_is_launched():
    code = "from fabric import Fabric\nf = Fabric(accelerator='cpu', devices=2, launcher='forkserver')\n"
    code += "def train(fabric): return fabric.all_reduce(fabric.global_rank, reduce_op='sum')\nprint(f.launch(train))"
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("kind", ["module", pytest.param("zip", marks=pytest.mark.slow)])
def test_modules_and_archives_are_run_again(tmp_path, kind):
    command = ["-W", "error", "-m", "job", "popen", "rank"]
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
            archive.write(SCRIPTS / "job.py", "__main__.py")
            archive.write(SCRIPTS / "actions.py", "actions.py")
        command = ["-Werror", "job.zip", "popen", "rank"]
    where = tmp_path if kind == "zip" else SCRIPTS
    done = subprocess.run(
        [sys.executable, *command],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "result 0\n", "")


@pytest.mark.parametrize(
    ("environ", "processes", "cores", "threads"),
    [({}, 2, 8, "4"), ({}, 3, 8, "2"), ({}, 8, 2, "1"), ({"OMP_NUM_THREADS": "5"}, 2, 8, "5")],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(environ, processes, cores, threads):
    assert (
        rank_variables(environ, node_worlds(processes)[0], cores, "linux")["OMP_NUM_THREADS"]
        == threads
    )


def test_gloo_stays_on_the_loopback_interface_of_the_platform():
    assert rank_variables({}, World(), 1, "linux")["GLOO_SOCKET_IFNAME"] == "lo"
    assert rank_variables({}, World(), 1, "darwin")["GLOO_SOCKET_IFNAME"] == "lo0"
    assert (
        rank_variables({"GLOO_SOCKET_IFNAME": "ib0"}, World(), 1, "linux")["GLOO_SOCKET_IFNAME"]
        == "ib0"
    )


def raised(error, during=None):
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
def test_secondary_failures_are_told_from_causes(error, expected):
    assert is_secondary(error) is expected


@pytest.fixture
def no_cloudpickle(monkeypatch):
    monkeypatch.setattr(serialize, "has_cloudpickle", lambda: False)


def test_a_function_of_a_module_travels_by_name_and_nobody_asks_for_cloudpickle(monkeypatch):
    monkeypatch.setattr(
        serialize, "has_cloudpickle", lambda: pytest.fail("its import takes as long as a launch")
    )
    packed, needs_main = dump_call(Call(torch.ones, (2,), {}), main_is_importable=False)
    assert not needs_main
    assert len(packed) < 200


@pytest.mark.usefixtures("no_cloudpickle")
def test_a_closure_without_cloudpickle_names_the_installation():
    with pytest.raises(MissingDependencyError, match=r'pip install "torch-fabric\[notebook\]"'):
        dump_call(Call(lambda: None, (), {}), main_is_importable=True)


def test_a_function_of_a_notebook_without_cloudpickle_names_the_installation(monkeypatch):
    main = sys.modules["__main__"]
    exec("def typed(): return 1", main.__dict__)
    function = main.typed
    try:
        assert not dump_call(Call(function, (), {}), main_is_importable=False)[1]
        monkeypatch.setattr(serialize, "has_cloudpickle", lambda: False)
        assert dump_call(Call(function, (), {}), main_is_importable=True)[1]
        with pytest.raises(MissingDependencyError, match="typed"):
            dump_call(Call(function, (), {}), main_is_importable=False)
    finally:
        del main.typed


@pytest.mark.parametrize("by_value", [False, True])
def test_an_argument_that_cannot_travel_is_named(monkeypatch, by_value):
    monkeypatch.setattr(serialize, "has_cloudpickle", lambda: by_value)
    with pytest.raises(ArgumentTypeError, match=r"kwargs\['data'\]\[2\] is a generator"):
        dump_call(Call(print, (), {"data": [1, 2, (x for x in ())]}), main_is_importable=True)


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
