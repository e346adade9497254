"""Nobody operates on a policy: before, during and after an update and a control step no module has a hook, an attribute that
hides a method, another class than it was made with, or other parts than before; and nobody changes a batch.
"""

import ast
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from goldens import api, cases, material

ROOT = Path(__file__).parents[2]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WAYS = ("eager", "compiled", "whole episodes", "encoded episodes", "LeRobot's batch", "attached")
OFTEN = 40  # forward calls from one look at all modules to the next; each looks at its own
Seen = dict[str, tuple[int, type]]
Built = WeakKeyDictionary[nn.Module, type]


def wounds(module: nn.Module, built: Built, name: str = "") -> list[str]:
    """What was done to a module that nobody should do."""
    kind = type(module)
    found = [f"{name}: {kind.__name__} has {hooks}" for hooks in HOOKS if getattr(module, hooks)]
    hidden = [attribute for attribute in vars(module) if callable(getattr(kind, attribute, None))]
    found += [f"{name}: its {attribute} hides that of {kind.__name__}" for attribute in hidden]
    if (first := built.get(module, kind)) is not kind:
        found.append(f"{name}: is a {kind.__name__}, and was made as a {first.__name__}")
    return found


def parts(policy: nn.Module) -> Seen:
    """Every module by name: which it is, and its class."""
    return {name: (id(module), type(module)) for name, module in policy.named_modules(remove_duplicate=False)}


class Surveillance:
    """Looks at policies while they compute."""

    def __init__(self, built: Built):
        self.built, self.watched, self.found, self.calls = built, list[tuple[nn.Module, Seen]](), list[str](), 0

    def watch(self, policy: nn.Module) -> None:
        """From now on this one, too, shall stay what it is."""
        self.watched.append((policy, parts(policy)))

    def look(self) -> None:
        """At every module of every policy."""
        for policy, before in self.watched:
            now = parts(policy)
            self.found += [
                f"{name}: was exchanged" for name in before.keys() | now.keys() if before.get(name) != now.get(name)
            ]
            for name, module in policy.named_modules():
                self.found += wounds(module, self.built, name)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """What Python calls for every function."""
        module = frame.f_locals.get("self") if event == "call" and frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            self.calls += 1
            self.found += wounds(module, self.built)
            if self.calls % OFTEN == 1:
                self.look()

    @contextmanager
    def during(self) -> Iterator[None]:
        """While this lasts, and before and after it."""
        self.look()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
        self.look()


@contextmanager
def births() -> Iterator[Built]:
    """The class as which every module is made meanwhile."""
    found: Built = WeakKeyDictionary()
    make = nn.Module.__init__

    def noted(self: nn.Module, *given: Any, **options: Any) -> None:
        found[self] = type(self)
        make(self, *given, **options)

    with mock.patch.object(nn.Module, "__init__", noted):
        yield found


def notes(x: Any) -> Any:
    """What a batch holds, as something that can be compared: which tensors, and how often each was written to."""
    if isinstance(x, Tensor):
        return id(x), x._version
    if isinstance(x, dict):
        return {name: notes(each) for name, each in x.items()}
    if isinstance(x, tuple | list):
        return [notes(each) for each in x]
    return {name: notes(each) for name, each in vars(x).items()} if hasattr(x, "__dataclass_fields__") else x


def update(policy: Any, batch: Any, eyes: Surveillance) -> None:
    """Three updates, as a training loop makes them."""
    policy.train()
    optimizer, before = torch.optim.AdamW(policy.get_optim_params(), lr=1e-4), notes(batch)
    with eyes.during():
        for _ in range(3):
            policy(batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert notes(batch) == before


def control(policy: Any, eyes: Surveillance) -> None:
    """Six steps of two rows, of which one begins anew."""
    for step in range(6):
        rows = [(0, step), (1, step % 4)]
        batch = material.observation(rows, torch.float32)
        before = notes(batch)
        with eyes.during():
            if step == 4:
                policy.observe(batch)
            else:
                policy.select_action(batch)
        assert notes(batch) == before


@pytest.mark.parametrize("kind", ["act, vae", "act, residual", "diffusion", "diffusion, separate"])
@pytest.mark.parametrize("way", WAYS)
def test_nobody_operates_on_a_policy(kind, way):
    if way == "attached" and kind not in ("act, residual", "diffusion"):
        pytest.skip("it is attached the same way")
    memory = cases.TRACE | {"history_frames": 4, "history_stride": 2}
    with births() as built, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        policy = cases.small(api, kind, memory, attached=way == "attached")
        material.fill(api.named(policy))
        api.give_paths(policy, api.paths(*material.paths()))
        eyes = Surveillance(built)
        eyes.watch(policy)
        if way == "compiled":
            eyes.watch(policy.compile_for_control(rows=2).policy)
        if way in ("eager", "compiled", "attached"):
            control(policy, eyes)
        if way == "attached" or way == "LeRobot's batch":
            policy.use_eager()
            update(policy, cases.history(policy, torch.float32), eyes)
        if way.endswith("episodes"):
            given = cases.targets(policy, torch.float32, [1, 0], [[5, 9], [0, 8]])
            if way.startswith("encoded"):
                given["frames"] = [x.detach() for x in policy.encode(given["frames"])]
            update(policy, api.episode_batch(policy, given, frozen=way.startswith("encoded")), eyes)
    assert eyes.calls > 100
    assert not eyes.found, "\n".join(dict.fromkeys(eyes.found))


def swapped(policy: Any) -> None:
    policy.model.backbone = nn.Identity()


def hidden(policy: Any) -> None:
    policy.model.forward = policy.model.forward


def hooked(policy: Any) -> None:
    policy.model.backbone.register_forward_hook(lambda *_: None)


def renamed(policy: Any) -> None:
    policy.model.decoder.__class__ = type("Other", (type(policy.model.decoder),), {})


@pytest.mark.parametrize("operate", [swapped, hidden, hooked, renamed])
def test_an_operation_is_noticed(operate: Callable[[Any], None]):
    with births() as built:
        policy = cases.small(api, "act", cases.TRACE)
        eyes = Surveillance(built)
        eyes.watch(policy)
        eyes.look()
        assert not eyes.found
        operate(policy)
        eyes.look()
    assert eyes.found


def operations(text: str) -> list[str]:
    """What a file does to classes, methods or modules of others, or asks for with a hook. Settings of torch's are none."""
    tree, found = ast.parse(text), []
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        given = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in [part for each in given for part in getattr(each, "elts", [each])]:
            inner = target.value if isinstance(target, ast.Subscript) else target
            if not isinstance(inner, ast.Attribute):
                continue
            name = ast.unparse(inner)
            others = name.partition(".")[0] in imported and not name.startswith(("torch.backends.", "os.environ"))
            if others or inner.attr in ("__class__", "__dict__", "forward"):
                found.append(f"{node.lineno}: assigns to {name}")
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if call == "setattr" or (".register_" in call and call.endswith("hook")):
            found.append(f"{node.lineno}: {call}")
    return found


@pytest.mark.parametrize("file", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_asks_for_an_operation(file):
    """Nothing of LeRobot's, datasets' or torch's is patched, and no hook carries data."""
    assert not operations(file.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "policy.__class__ = Other",
        "vars(x).__dict__['a'], b.forward = 1, 2",
        "from lerobot import policies\npolicies.act.forward_ = 1",
        "import torch\ntorch.nn.Linear.extra = 1",
        "setattr(policy, 'x', 1)",
        "module.register_forward_hook(f)",
    ],
)
def test_an_operation_in_a_source_is_noticed(line):
    assert operations(line)
    assert not operations("import torch\ntorch.backends.cudnn.allow_tf32 = True\nself.x = 1")


OWNED = {  # what a function has made itself a line before
    ("lerobot_policy_trace/compiled.py", "made.error"),
    ("lerobot_policy_trace/encoder.py", "made.weight"),
    ("lerobot_policy_trace/encoder.py", "made.bias"),
}
WRITTEN = [
    file for package in ("lerobot_policy_trace", "trace_memory") for file in (ROOT / "src" / package).rglob("*.py")
]


def intrusions(text: str) -> list[str]:
    """Attributes, or items of attributes, that a file assigns to objects other than a method's own. Settings are none."""
    found = []
    for node in ast.walk(ast.parse(text)):
        inner = node.value if isinstance(node, ast.Subscript) else node
        if not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) or not isinstance(inner, ast.Attribute):
            continue
        if not (name := ast.unparse(inner)).startswith(("self.", "cls.", "torch.backends.")):
            found.append(name)
    return found


@pytest.mark.parametrize("file", sorted(WRITTEN), ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_sets_what_belongs_to_others(file):
    place = str(file.relative_to(ROOT / "src"))
    assert {(place, name) for name in intrusions(file.read_text())} <= OWNED


@pytest.mark.parametrize(
    "line",
    [
        "def f(param): param.attr = 1",
        "def f(param): param.attr += 1",
        "def f(param): param.attr: int = 1",
        "def f(self, param): self.x, param.inner.attr = 1, 2",
        "def f(param): param.attr['key'] = 1",
        "def f(param):\n    for param.attr in (1, 2): pass",
        "def f(param): del param.attr",
        "states = Moments(1)\nstates.mean = 0",
    ],
)
def test_setting_what_belongs_to_others_is_noticed(line):
    assert intrusions(line)
    assert not intrusions("def f(self, param):\n    self.x = param.x\n    x = param.x[1]\n    self.y[param.x] = 1")
