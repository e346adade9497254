"""The command line: quick answers, and every failure a sentence and an exit code."""

import subprocess
import sys
from importlib import import_module, metadata

import pytest

import trace_errors
from trace_lab import cli
from trace_lab.cli import COMMANDS, main

HEAVY = {"torch", "lerobot", "mujoco", "mink", "datasets", "av", "pandas", "matplotlib", "accelerate", "ray"}


def loaded_by(code: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh process, which fails if anything heavy was imported."""
    code += f"\nimport sys; heavy = {HEAVY} & set(sys.modules); sys.exit(str(sorted(heavy)) if heavy else 0)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_lists_every_command_and_loads_nothing_heavy():
    run = loaded_by("from trace_lab.cli import main\nmain(['--help'])")
    assert run.returncode == 0, run.stderr
    assert all(f"  {name} " in run.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_wrong_options_of_a_command_load_nothing_heavy(name):
    run = loaded_by(f"""
from trace_lab.cli import main
for words, code in ((["--help"], 0), (["--no-such-option", "1"], 2)):
    try:
        main([{name!r}, *words])
    except SystemExit as stop:
        assert stop.code == code, stop.code
    else:
        raise AssertionError("went on")
""")
    assert run.returncode == 0, run.stderr
    assert f"tracemem {name}" in run.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["collect", "Nope", "--out", "x"], "there is no task 'Nope'"),
        (["collect", "--out", "x"], "name one task"),
        (["gallery", "--task", "Nope"], "there is no task 'Nope'"),
        (["probe-task", "Nope"], "there is no task 'Nope'"),
        (["doctor", "/no/where"], "/no/where: no meta/info.json"),
        (["params", "--hidden", "0"], "memory hidden: 0, expected a whole number, 1 or more"),
        (["compare", "--out", "x", "--tasks", "Nope"], "there is no task 'Nope'"),
        (["probe", "--memory", "nope"], "--memory: 'nope' is not known"),
        (["eval", "/no/where"], "/no/where: no policy there"),
        (["attach", "/no/where", "--out", "x"], "/no/where: no config.json there"),
        (["attach", "/no/where", "--out", "x", "--memory", "gur"], "--memory: there is no 'gur'; did you mean 'gru'?"),
        (["profile", "--steps", "5"], "--steps, --seconds, --sizes: got (5, "),
        (["profile", "--memory", "gur"], "--memory: there is no 'gur'; did you mean 'gru'?"),
        (["demo", "--episodes", "0"], "--episodes: got 0, expected 1 or more"),
        (["demo", "--seed", "-1"], "--seed: got -1, expected 0 or more"),
        (["report", "--show", "nope"], "nope: no such set in results"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_heavy_is_loaded(words, message):
    run = loaded_by(f"from trace_lab.cli import main\nassert main({words}) in (1, 2)")
    assert run.returncode == 0, run.stderr
    assert f"tracemem {words[0]}: {message}" in run.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_is_built_and_explains_itself(name, capsys):
    module, function = COMMANDS[name].target.split(":")
    assert callable(getattr(import_module(module), function))
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"tracemem {name}" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys):
    assert main(["dem"]) == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == metadata.version("lerobot_policy_trace")


ERRORS = [error for error in vars(trace_errors).values() if isinstance(error, type)]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_ours_is_one_line_and_its_exit_code(error, monkeypatch, capsys):
    def fail(name, options):
        raise error("size: got 2, expected 8 to 960 pixels")

    monkeypatch.setattr(cli, "run", fail)
    assert main(["collect"]) == error.exit_code == (2 if error is trace_errors.UsageError else 1)
    assert capsys.readouterr().err == "tracemem collect: size: got 2, expected 8 to 960 pixels\n"


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["collect"]) == 1
    said = "needs tyro, which is not installed; pip install 'lerobot_policy_trace[all]'"
    assert capsys.readouterr().err == f"tracemem collect: {said}\n"


@pytest.mark.parametrize("said", ["", "stopped after 3 episodes. To go on: tracemem collect"])
def test_ctrl_c_is_one_sentence(said, monkeypatch, capsys):
    def stop(name, options):
        raise KeyboardInterrupt(*filter(None, [said]))

    monkeypatch.setattr(cli, "run", stop)
    assert main(["collect"]) == 130
    assert capsys.readouterr().err == f"tracemem collect: {said or 'stopped by Ctrl-C'}\n"


def test_a_reader_that_leaves_is_no_error():
    code = (
        "from trace_lab import cli; cli.run = lambda *_: [print('x' * 1000) for _ in range(1000)] and 0;"
        "import sys; sys.exit(cli.main(['params']))"
    )
    line = f'"{sys.executable}" -c "{code}" | head -1; echo ${{PIPESTATUS[0]}}'
    run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert run.stdout.split()[1] == "141"
    assert run.stderr == ""
