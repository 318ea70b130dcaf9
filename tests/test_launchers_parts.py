"""The pure parts of the launchers: command lines, variables, detection, and what travels how."""

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fabric.errors import ArgumentTypeError, CollectiveMismatchError, ConfigurationError, MissingDependencyError
from fabric.launchers import LAUNCHERS, LaunchSpec, is_interactive, is_notebook, notebook_start_method
from fabric.launchers._failures import RunDirectory, is_consequence
from fabric.launchers._transport import pack_call
from fabric.launchers.base import interpreter_options, rank_variables
from fabric.launchers.script import rerun_command

SCRIPTS = Path(__file__).parent / "scripts" / "launchers"
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("line", "options", "rest"),
    [
        ("python train.py -m --x", "", "train.py -m --x"),
        ("python -u -W error -Xdev train.py", "-u -W error -X dev", "train.py"),
        ("python -uWerror -m pkg.mod --lr 1", "-u -W error", "-m pkg.mod --lr 1"),
        ("python -OOmpkg a", "-OO", "-m pkg a"),
        ("python -i train.py", "-", "train.py"),
        ("python -Im pkg", "-I", "-m pkg"),
        ("python --check-hash-based-pycs always -B train.py", "--check-hash-based-pycs always -B", "train.py"),
        ("python -c print()", "", "-c print()"),
        ("python -", "", "-"),
        ("python", "", ""),
    ],
)
def test_a_command_line_splits_into_options_and_the_rest(line, options, rest):
    assert interpreter_options(line.split()) == ([o for o in options.split() if o != "-"], rest.split())


def module(file, spec=None):
    made = ModuleType("__main__")
    made.__file__ = file
    made.__spec__ = SimpleNamespace(name=spec) if spec else None  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("main", "argv", "orig_argv", "expected"),
    [
        (module("/w/a.py"), ["a.py"], ["python", "-u", "/w/a.py", "--x"], ["-u", "/w/a.py", "--x"]),
        (module("/w/m.py", "pkg.mod"), ["/w/m.py"], ["python", "-m", "pkg.mod", "1"], ["-m", "pkg.mod", "1"]),
        (module("/w/__main__.py", "pkg.__main__"), ["/w"], ["python", "-m", "pkg", "1"], ["-m", "pkg", "1"]),
        (module("/w/a.zip/__main__.py", "__main__"), ["a.zip"], ["python", "/w/a.zip", "1"], ["/w/a.zip", "1"]),
        (module("/w/a.py"), ["a.py", "--y"], ["python", "/debugger", "--port", "1", "a.py", "--y"], ["/w/a.py", "--y"]),
    ],
    ids=["script", "module", "package", "zip", "debugger"],
)
def test_the_command_that_started_a_script_is_found(main, argv, orig_argv, expected):
    command = rerun_command(main, argv=argv, orig_argv=orig_argv, interactive=False)
    assert command == [sys.executable, *expected]


def test_prompts_and_notebooks_cannot_be_run_again():
    with pytest.raises(ConfigurationError, match="notebook or a prompt"):
        rerun_command(module("/w/a.py"), orig_argv=["python"], interactive=True)


def test_code_on_the_command_line_cannot_be_run_again():
    code = "from fabric.launchers import *; LAUNCHERS['popen'].check(LaunchSpec(num_processes=2))"
    for arguments, text in ((["-c", code], None), (["-"], code)):
        done = subprocess.run(
            [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=30, check=False
        )
        assert "python -c` or standard input" in done.stderr
        assert 'launcher="forkserver"' in done.stderr


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
        [sys.executable, *command], cwd=where, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "result 0\n", "")


@pytest.mark.parametrize(
    ("environ", "processes", "cores", "threads"),
    [({}, 2, 8, "4"), ({}, 3, 8, "2"), ({}, 8, 2, "1"), ({"OMP_NUM_THREADS": "5"}, 2, 8, "5")],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(environ, processes, cores, threads):
    assert rank_variables(environ, processes, cores, "linux")["OMP_NUM_THREADS"] == threads


def test_gloo_stays_on_the_loopback_interface_of_the_platform():
    assert rank_variables({}, 1, 1, "linux")["GLOO_SOCKET_IFNAME"] == "lo"
    assert rank_variables({}, 1, 1, "darwin")["GLOO_SOCKET_IFNAME"] == "lo0"
    assert rank_variables({"GLOO_SOCKET_IFNAME": "ib0"}, 1, 1, "linux")["GLOO_SOCKET_IFNAME"] == "ib0"


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
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), True),
        (ValueError("timeout has to be positive"), False),
        (RuntimeError("shape mismatch"), False),
        (raised(RuntimeError("Connection closed by peer"), during=ValueError("bad loss")), False),
        (raised(ValueError("bad loss"), during=ConnectionError("gone")), True),
    ],
)
def test_consequences_of_another_failure_are_told_from_causes(error, expected):
    assert is_consequence(error) is expected


def test_a_signal_that_cannot_be_noted_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    RunDirectory(tmp_path / "file").say_heard(0, 15)


def test_a_function_of_a_module_travels_by_name():
    packed, needs_main = pack_call((torch.ones, (2,), {}), main_is_importable=False, by_value=False)
    assert not needs_main
    assert len(packed) < 200


def test_a_closure_without_cloudpickle_names_the_installation():
    with pytest.raises(MissingDependencyError, match=r'pip install "torch-fabric\[notebook\]"'):
        pack_call((lambda: None, (), {}), main_is_importable=True, by_value=False)


def test_a_function_of_a_notebook_without_cloudpickle_names_the_installation():
    main = sys.modules["__main__"]
    exec("def typed(): return 1", main.__dict__)
    function = main.typed
    try:
        with pytest.raises(MissingDependencyError, match="typed"):
            pack_call((function, (), {}), main_is_importable=False, by_value=False)
        assert pack_call((function, (), {}), main_is_importable=True, by_value=False)[1]
        assert not pack_call((function, (), {}), main_is_importable=False, by_value=True)[1]
    finally:
        del main.typed


@pytest.mark.parametrize("by_value", [False, True])
def test_an_argument_that_cannot_travel_is_named(by_value):
    with pytest.raises(ArgumentTypeError, match=r"kwargs\['data'\]\[2\] is a generator"):
        pack_call((print, (), {"data": [1, 2, (x for x in ())]}), main_is_importable=True, by_value=by_value)


def test_a_notebook_gets_the_start_method_that_is_safe_there():
    assert notebook_start_method(can_pickle_functions=True) == "forkserver"
    assert notebook_start_method(can_pickle_functions=True, backend="CUDA") == "forkserver"
    assert notebook_start_method(can_pickle_functions=False, platform="linux") == "fork"


@pytest.mark.parametrize(
    ("backend", "platform", "reason"), [("CUDA", "linux", "CUDA is initialised"), (None, "darwin", "macOS")]
)
def test_a_notebook_where_nothing_is_safe_says_why(backend, platform, reason):
    with pytest.raises(ConfigurationError, match=reason) as caught:
        notebook_start_method(can_pickle_functions=False, backend=backend, platform=platform)
    assert "cloudpickle" in str(caught.value)


def test_a_test_run_is_neither_a_notebook_nor_a_prompt():
    assert not is_notebook()
    assert not is_interactive()


@pytest.mark.gpu
def test_fork_is_refused_once_cuda_is_initialised():
    torch.cuda.init()
    with pytest.raises(ConfigurationError, match="CUDA is initialised"):
        LAUNCHERS["fork"].check(LaunchSpec(num_processes=2, device_type="cpu"))
    LAUNCHERS["forkserver"].check(LaunchSpec(num_processes=2, device_type="cuda"))
