"""The lock file, the offline bundle and the file-length guard."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~;! ]", requirement)[0]).lower()


def test_lock_pins_every_dependency_and_holds_no_address():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[a-zA-Z0-9._-]+==[\w.+!-]+( ; .+)?", line) for line in lines)
    locked = {canonical(line) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    assert {canonical(requirement) for requirement in wanted} <= locked


def test_bundle_packs_the_robot_stack_and_not_torch():
    listing = subprocess.run(
        [sys.executable, ROOT / "tools/bundle", "--list", "unused"], capture_output=True, text=True, check=True
    )
    names = set(listing.stdout.split())
    assert {"lerobot", "mujoco", "mink", "pysiglib", "gymnasium", "tyro", "lerobot-policy-trace"} <= names
    assert not names & {"torch", "numpy", "triton", "pytest", "ruff"}


def test_long_files_are_listed(tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * 11)
    (tmp_path / "short.py").write_text("x = 1\n" * 10)
    long_files = runpy.run_path(str(ROOT / "tools/long_files.py"))["long_files"]
    assert long_files([tmp_path], 10) == [(11, tmp_path / "long.py")]
