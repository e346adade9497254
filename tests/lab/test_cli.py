import subprocess
import sys
from importlib import import_module

import pytest

from trace_lab.cli import COMMANDS, main


def test_help_lists_every_command_and_loads_nothing_heavy():
    code = (
        "import sys; from trace_lab.cli import main; main(['--help']);"
        "heavy = {'torch', 'lerobot', 'mujoco', 'numpy'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert all(f"  {name} " in run.stdout for name in COMMANDS)


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
    assert capsys.readouterr().out.strip() == "0.1.0"
