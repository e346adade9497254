"""Set-up as a newcomer meets it: an odd Python, no network, no GL. The real script, on faked machines."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path):
    """A copy of what set-up reads, on a machine whose `python3`, `python` and `python3.12` are all unusable."""
    project, fakes = tmp_path / "project", tmp_path / "fakes"
    (project / "tools").mkdir(parents=True)
    fakes.mkdir()
    for name in ("tools/setup", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, project / name)
    for name in ("python3.12", "python3", "python"):
        script(fakes / name, "exit 1")
    environment = {"PATH": f"{fakes}:/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "TRACE_NO_APT": "1"}
    return project, environment


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def setup(project: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run([project / "tools/setup"], env=environment, capture_output=True, text=True, check=False)


def last_sentence(run: subprocess.CompletedProcess) -> str:
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stderr.strip().splitlines()[-1]


def test_no_python_312_says_how_to_get_one(machine):
    project, environment = machine
    message = last_sentence(setup(project, environment))
    assert "Python 3.12 with venv was not found" in message
    assert "PYTHON=/path/to/python3.12" in message
    assert not (project / ".venv").exists()


def test_wrong_python_variable_is_named(machine):
    project, environment = machine
    message = last_sentence(setup(project, environment | {"PYTHON": "/bin/false"}))
    assert "PYTHON=/bin/false is not a Python 3.12" in message


def test_pyenv_312_is_found_and_no_network_is_said(machine, tmp_path):
    project, environment = machine
    script(tmp_path / ".pyenv/versions/3.12.9/bin/python", f'exec {os.path.realpath(sys.executable)} "$@"')
    run = setup(project, environment)
    assert "creating .venv with Python 3.12" in run.stdout
    message = last_sentence(run)
    assert "check the network" in message
    assert "run the same command again" in message


def test_no_gl_names_the_line_to_run(machine):
    project, environment = machine
    fake = 'case "$*" in *ensurepip*) exit 0;; -VV) echo fake; exit 0;; *) exit 1;; esac'
    script(project / ".venv/bin/python", fake)
    read = [(project / name).read_bytes() for name in ("requirements.lock", "pyproject.toml", "tools/setup")]
    stamp = hashlib.sha256(b"".join(read) + f"fake\n{project}\n".encode()).hexdigest()
    (project / ".venv/.setup-stamp").write_text(stamp)
    message = last_sentence(setup(project, environment))
    assert "OpenGL without a screen" in message
    assert "apt-get install -y --no-install-recommends libegl1" in message
