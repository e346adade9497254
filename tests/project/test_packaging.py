"""The lock file, the extras and the offline bundle."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~;! ]", requirement)[0]).lower()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
WANTED = [*PROJECT["project"]["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]


def test_lock_pins_every_dependency_and_holds_no_address():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[a-zA-Z0-9._-]+==[\w.+!-]+( ; .+)?", line) for line in lines)
    locked = {canonical(line) for line in lines}
    wanted = [*WANTED, *PROJECT["dependency-groups"]["dev"]]
    assert {canonical(requirement) for requirement in wanted} - {"lerobot-policy-trace"} <= locked


def test_the_base_is_small_and_ray_is_only_where_it_is_asked_for():
    base = PROJECT["project"]["dependencies"]
    assert {canonical(requirement) for requirement in base} == {"torch", "safetensors", "jaxtyping"}
    assert [extra for extra, wanted in EXTRAS.items() if any(canonical(each) == "ray" for each in wanted)] == ["ray"]
    assert EXTRAS["all"] == ["lerobot_policy_trace[sim,train,signature]"]


def test_the_version_is_that_of_the_changelog():
    """Its newest heading; the citation has the same."""
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    cited = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [PROJECT["project"]["version"]] == [newest]


def test_ranges_have_both_ends():
    """tools/verify tries each end."""
    ranges = " ".join(WANTED)
    assert "torch>=2.7" in ranges
    assert "mujoco>=3.3,<4" in ranges
    assert "lerobot[training,diffusion]>=0.6.1,<0.7" in ranges


def test_bundle_packs_the_robot_stack_and_not_torch():
    listing = subprocess.run(
        [sys.executable, ROOT / "tools/bundle", "--list", "unused"], capture_output=True, text=True, check=True
    )
    names = set(listing.stdout.split())
    assert {"lerobot", "mujoco", "mink", "pysiglib", "gymnasium", "tyro", "lerobot-policy-trace"} <= names
    assert not names & {"torch", "numpy", "triton", "pytest", "ruff"}
