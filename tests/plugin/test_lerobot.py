"""Names of LeRobot that begin with an underscore, and what we rely on of each: when a newer LeRobot has changed one, this
file names it. What we rely on of its public names is tested where it is used.
"""

import ast
import inspect
from pathlib import Path

import pytest
from lerobot.envs.utils import _LazyAsyncVectorEnv
from lerobot.policies.diffusion.modeling_diffusion import _make_noise_scheduler
from lerobot.policies.pretrained import PreTrainedPolicy

from lerobot_policy_trace.env import Workers
from lerobot_policy_trace.modeling_trace import MemoryPolicy

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
IMPORTED = {_LazyAsyncVectorEnv.__name__, _make_noise_scheduler.__name__}
OVERRIDDEN = {(Workers, _LazyAsyncVectorEnv): {"_ensure"}, (MemoryPolicy, PreTrainedPolicy): {"_load_as_safetensor"}}
SIGNATURES = [
    (_make_noise_scheduler, ["name", "kwargs"]),
    (_LazyAsyncVectorEnv, ["env_fns", "observation_space", "action_space", "metadata"]),
    (_LazyAsyncVectorEnv._ensure, ["self"]),
    (PreTrainedPolicy._load_as_safetensor, ["model", "model_file", "map_location", "strict"]),
]


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(text: str) -> set[str]:
    """Private names, and names of private modules, that a file takes from LeRobot."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
    names = [f"{getattr(node, 'module', '')}.{each.name}".strip(".") for node in found for each in node.names]
    ours = [name.split(".") for name in names if name.split(".")[0] == "lerobot"]
    return {name[-1] for name in ours if any(map(private, name))}


def test_no_other_private_name_is_imported():
    assert set().union(*(imported(file.read_text()) for file in SOURCES)) == IMPORTED


@pytest.mark.parametrize("line", ["from lerobot.a import _b", "import lerobot._a.b", "from lerobot._a import b"])
def test_a_private_name_is_noticed(line):
    assert imported(line)
    assert not imported("from lerobot.a import b, __version__")


@pytest.mark.parametrize(("ours", "theirs"), OVERRIDDEN)
def test_what_we_override_is_there_and_nothing_else_is(ours, theirs):
    mine = {name for name, each in vars(ours).items() if private(name) and not name.startswith("_abc")}
    assert {name for name in mine if hasattr(theirs, name)} >= OVERRIDDEN[ours, theirs]
    extra = {
        name for name in mine if callable(vars(theirs).get(name)) or isinstance(vars(theirs).get(name), classmethod)
    }
    assert extra <= OVERRIDDEN[ours, theirs]


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES, ids=lambda x: getattr(x, "__name__", ""))
def test_what_we_rely_on_is_as_it_was(function, parameters):
    assert list(inspect.signature(function).parameters) == parameters


def test_environments_wait_for_their_first_use():
    """`Workers._ensure` makes what its parent keeps in `_env`, of what it keeps in `_env_fns`."""
    held = _LazyAsyncVectorEnv([], observation_space=0, action_space=0, metadata={})
    assert (held._env, held._env_fns) == (None, [])
