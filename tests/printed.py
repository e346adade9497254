"""The commands that README and docs print, and a reader who types them: each as printed, all in one folder, each after those
that make what it needs.

What takes long is shortened: `SHORTER` appends sizes (of data, networks and updates), every one of an option that has a
default, so a user needs none of them. One environment variable governs this: `TRACE_FULL=1` appends nothing, and every
command runs exactly as printed, for hours. Commands that are not run here at all are listed with the reason in `NOT_RUN`.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md"), *ROOT.glob("docs/*.md")])
PROGRAMS = (
    "tracemem",
    "lerobot-train",
    "lerobot-eval",
    "lerobot-rollout",
    "make",
    "pip",
    "python",
    "tools/pack_checkpoint",
)

NOT_RUN = {  # program and first word -> why: run once by hand before a release
    (
        "make",
        None,
    ): "set-up, all tests, the demonstration, packing; each is a target of the Makefile",
    ("pip", None): "make verify installs every extra into a fresh environment",
    ("tracemem", "demo"): "20 minutes; tests/lab/test_demo.py runs it small",
    ("tracemem", "compare"): "hours; tests/lab/test_compare.py runs it small",
    ("python", None): "benchmarks, of minutes each",
    ("tools/pack_checkpoint", None): "packs what make demo has trained",
}
ACT = "--policy.dim_model=32 --policy.n_heads=2 --policy.dim_feedforward=32 --policy.n_encoder_layers=1"
SHORTER = {  # program and first word -> sizes
    ("tracemem", "collect"): "--episodes 2 --size 32",
    ("tracemem", "train"): "--steps 1 --set episodes=2 targets=2",
    ("tracemem", "eval"): "--episodes 1 --limit 3",
    ("tracemem", "probe-task"): "--episodes 10 --size 24",
    ("tracemem", "probe"): "--updates 25 --batch 4 --episodes 16 --few 2",
    ("tracemem", "gallery"): "--size 40",
    # networks: the preset's are smaller; Diffusion Policy's hundred denoising steps take a minute a call on a CPU
    ("tracemem", "profile"): "--policies act --preset tiny --sizes 32 --steps 100 --seconds 0.1",
    # workers: two small batches are read in the process itself; log and checkpoint are of the last update
    ("lerobot-train", None): "--steps=2 --batch_size=2 --num_workers=0 --log_freq=1 --save_freq=2",
    ("lerobot-train", "--policy.type=act"): ACT,
    ("lerobot-train", "--policy.type=trace_act"): ACT + " --policy.memory.width=32 --policy.memory.hidden=32",
    ("lerobot-eval", None): "--eval.n_episodes=1 --eval.batch_size=1 --env.limit=4",
    ("lerobot-rollout", None): "--duration=2",
}
SIZES = {
    "lerobot-eval": "--env.size=32",
    "lerobot-rollout": "--robot.size=32",
}  # the pictures that `collect` above makes, unless the command says another
INCONCLUSIVE = {"probe-task": {0, 1}}  # so few episodes prove nothing either way


@dataclass(frozen=True)
class Command:
    """A line that a page tells people to type."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def program(self) -> str:
        return self.words[0]

    def matching(self, table: dict) -> list:
        """What a table says of this program, and of this program with its first word."""
        keys = [(self.program, None), (self.program, next(iter(self.words[1:]), None))]
        return [table[key] for key in keys if key in table]

    @property
    def makes(self) -> str | None:
        """The folder it writes."""
        found = re.search(r"--(?:out|output_dir)[ =](\S+)", self.line)
        return found[1] if found else None

    def needs(self, other: "Command") -> bool:
        """Whether the other one makes something that this one reads."""
        if self == other or other.makes is None or other.makes == self.makes:
            return False
        values = [word.rpartition("=")[2] for word in self.words if word != self.makes]
        return any(value == other.makes or value.startswith(f"{other.makes}/") for value in values)


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks marked with one of these languages."""
    parts = text.split("```")[1::2]
    return [body for language, _, body in (part.partition("\n") for part in parts) if language in languages]


@cache
def commands() -> tuple[Command, ...]:
    """Every command of every page, each once, in the order of a reader who begins with the README."""
    found: dict[str, Command] = {}
    for page in sorted(PAGES, key=lambda page: (page != ROOT / "README.md", page)):
        for block in blocks(page.read_text(), "", "sh", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                text = " ".join(line.split(" #")[0].split())
                if text.split(" ")[0] in PROGRAMS:
                    found.setdefault(text, Command(str(page.relative_to(ROOT)), text))
    return tuple(found.values())


class Reader:
    """Someone in a folder of their own, with the project's checkpoints and results at hand, who types what is printed."""

    def __init__(self, folder: Path):
        self.folder, self.done = folder, set[Command]()
        for name in ("checkpoints", "results"):
            (folder / name).symlink_to(ROOT / name)

    def run(self, command: Command) -> None:
        """Once, after what it needs."""
        if command in self.done:
            return
        needed = {
            other.makes: other for other in reversed(commands()) if command.needs(other)
        }  # the first that makes it
        for other in needed.values():
            self.run(other)
        self.done.add(command)
        words = [*command.words]
        if os.environ.get("TRACE_FULL") != "1":
            words += [word for extra in command.matching(SHORTER) for word in extra.split()]
            if (size := SIZES.get(command.program, "")).split("=")[0] not in command.line:
                words.append(size)
        program, *arguments = words
        code, said = (self.here if program == "tracemem" else self.apart)(program, arguments)
        assert code in INCONCLUSIVE.get(command.words[1], {0}), f"{command.line}\n{said[-4000:]}"
        assert said.strip(), f"{command.line} says nothing"

    def here(self, program: str, arguments: list[str]) -> tuple[int, str]:
        """Our commands, in this process: importing LeRobot anew for each would take longer than what they do."""
        from trace_lab.cli import main

        said = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return main(arguments), said.getvalue()

    def apart(self, program: str, arguments: list[str]) -> tuple[int, str]:
        """LeRobot's commands, as they are installed."""
        script = Path(sys.executable).with_name(program)
        ended = subprocess.run(
            [script, *arguments], cwd=self.folder, env=self.environment, text=True, capture_output=True, timeout=600
        )
        return ended.returncode, ended.stdout + ended.stderr

    @cached_property
    def environment(self) -> dict[str, str]:
        """No network: what LeRobot would fetch for ACT's encoder lies where it would be kept."""
        import torch
        import torchvision

        weights = self.folder / "torch/hub/checkpoints/resnet18-f37072fd.pth"
        weights.parent.mkdir(parents=True)
        torch.save(torchvision.models.resnet18().state_dict(), weights)
        return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_HOME": str(self.folder / "torch")}
