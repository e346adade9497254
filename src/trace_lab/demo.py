"""`make demo`: demonstrations of a short task, the same policy trained without a memory and with TRACE, both tried on
held-out episodes, and a report with films, curves and a look inside the memory. Stopped, it goes on where it was.
"""

import base64
import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from trace_errors import UsageError
from trace_lab.results import SETTINGS

TASK, DELAY, SIZE = "Signal", 20, 64
MEMORIES = {"none": "without a memory", "trace": "with TRACE"}
FILMS = 4
PRESET = "tiny"
# Small enough for two cores: one camera, the encoder as it comes, whole episodes.
RECIPE: dict[str, Any] = {
    "cameras": "overhead",
    "backbone": "frozen",
    "episodes": 8,
    "targets": 8,
    "lr": 1e-3,
    "memory_lr": 1e-3,
    "rest_weight": 0.25,  # more than half of an episode is waiting; what matters is what comes of it
    "checkpoint": 400,
    "policy.use_vae": "false",
    "policy.n_action_steps": 5,  # predicts twice a second: a policy that acts for longer leaves before the lamp lights
    "memory.period": 4,
}

NAMES = ("policy", "right choices", "episodes completed", "mean progress")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; } th, td { padding: .4rem .8rem; border-bottom: 1px solid #d5dae2; text-align: left; }
img, video { max-width: 100%; border-radius: 6px; } figure { margin: 1rem 0; }
figcaption { color: #5a6475; font-size: .9rem; }
.films { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }
code { background: #f0f2f5; padding: .1rem .3rem; border-radius: 4px; }
"""
KINDS = {".png": "image/png", ".mp4": "video/mp4", ".webp": "image/webp"}
# The films of a row are started, stopped and moved together.
SYNC = """
for (const row of document.querySelectorAll(".together")) {
  const films = [...row.querySelectorAll("video")];
  for (const film of films) for (const [name, act] of [
    ["play", (x) => x.play()], ["pause", (x) => { if (!film.ended) x.pause(); }],
    ["seeked", (x) => { if (Math.abs(x.currentTime - film.currentTime) > 0.2) x.currentTime = film.currentTime; }],
  ]) film.addEventListener(name, () => films.filter((x) => x !== film).forEach(act));
}
"""


# -- the page: one HTML file that opens anywhere, without a network ---------------------------------------------------------


class Page:
    """Collects what a report shows, from top to bottom."""

    def __init__(self, title: str):
        self.title = title
        self.script = ""
        self.parts: list[str] = [f"<h1>{html.escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """A new section."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, words: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{html.escape(words)}</p>")

    def table(self, names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Rows under names."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
        self.parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def picture(self, path: Path, caption: str) -> None:
        """A PNG, or an animated WebP."""
        shown = f'<img src="{embedded(path)}" alt="{html.escape(caption)}">'
        self.parts.append(f"<figure>{shown}<figcaption>{html.escape(caption)}</figcaption></figure>")

    def films(self, films: Sequence[tuple[Path, str]]) -> None:
        """Videos side by side, played in step."""
        shown = "".join(
            f'<figure><video src="{embedded(path)}" controls muted></video>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
            for path, caption in films
        )
        self.script = f"<script>{SYNC}</script>"
        self.parts.append(f'<div class="films together">{shown}</div>')

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{STYLE}</style>'
        temporary = path.with_suffix(".tmp")
        temporary.write_text(
            f"<!doctype html><html><head>{head}</head><body>{''.join(self.parts)}{self.script}</body></html>"
        )
        temporary.replace(path)


def embedded(path: Path) -> str:
    """A file as an address that contains it."""
    return f"data:{KINDS[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


# -- what is on it ---------------------------------------------------------------------------------------------------------


def evaluation(out: Path, memory: str) -> Path:
    """Where the episodes of one policy are."""
    return out / memory / "evaluation" / TASK


def rows(out: Path) -> list[tuple[str, str, str, str]]:
    """The results, one row a policy."""
    made = []
    for memory, words in MEMORIES.items():
        each: dict[str, Any] = json.loads((evaluation(out, memory) / SETTINGS).read_text())["summary"]
        right = each["branch_accuracy"]
        chosen = "none taken" if right is None else f"{right:.0%} of {each['decisions']}"
        done = f"{each['outcomes'].get('success', 0)} of {each['episodes']}"
        made.append((f"ACT {words}", chosen, done, f"{each['mean_progress']:.0%}"))
    return made


def curves(out: Path) -> Path:
    """Both losses in one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    for memory, words in MEMORIES.items():
        lines = [json.loads(line) for line in (out / memory / "metrics.jsonl").read_text().splitlines()]
        axis.plot([line["step"] for line in lines], [line["l1_loss"] for line in lines], label=words)
    axis.set_xlabel("updates")
    axis.set_ylabel("error of the predicted actions (L1)")
    axis.set_yscale("log")
    axis.legend()
    path = out / "curves.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def report(out: Path, seed: int, demonstrations: int) -> Path:
    """The page, and the moving picture beside it."""
    from trace_lab import films, inside

    page = Page("A policy that remembers")
    page.text(
        "A card shows a colour. The robot rings the bell, and the card is gone. It waits; when the lamp turns green it "
        "must press the pad of the card's colour. By then nothing in sight tells which one it was: a policy without a "
        "memory can only guess."
    )
    page.text(
        f"The same LeRobot ACT was trained twice on the same {demonstrations} demonstrations (seed {seed}) and tried on "
        "the same held-out episodes. Everything on this page was made by the run that wrote it."
    )
    page.table(NAMES, rows(out))
    page.text("Guessing gets half of the choices right. An episode ends with a wrong choice.")
    page.heading("Held-out episodes")
    found = films.takes({words: evaluation(out, memory) for memory, words in MEMORIES.items()}, TASK)
    page.text(f"The first {len(found)} of them, each as both policies did it. The films of a row play together.")
    for seed_, each in found.items():
        page.films([(take.video, f"Episode {seed_}, {take.caption} ({take.outcome}).") for take in each])
    films.side_by_side(found[films.telling(found)], out / "films.webp")
    page.heading("Training")
    page.picture(curves(out), "Error of the predicted actions on the demonstrations, update by update.")
    pair = inside.counterfactual(out / "trace", TASK, seed=0, delay=DELAY)
    slot, share = inside.most_different(pair)
    inside.draw(pair, out / "inside.png")
    page.heading("Inside the memory")
    page.picture(
        out / "inside.png",
        "Held-out episode 0, done by the expert once for each colour of the card. A row of a panel is a slot of the memory.",
    )
    page.text(
        "Until the lamp lights the two episodes differ in nothing but the card, so any difference between the two memories "
        f"comes from it. When the lamp lights they differ most in slot {slot}, by {share:.0%} of its size."
    )
    path = out / "report.html"
    page.save(path)
    return path


# -- the command ----------------------------------------------------------------------------------------------------------


def demo(
    out: Path = Path("outputs/demo"),
    *,
    seed: int = 0,
    demonstrations: int = 128,
    steps: int = 2_400,
    episodes: int = 40,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> int:
    """Shows what a memory is for: collects demonstrations of a short task, trains ACT without a memory and with TRACE, tries
    both on held-out episodes, prints the table and writes a report. Under 20 minutes on two CPU cores.

    Stopped, it goes on where it was when called again. The report is report.html; films.webp shows one held-out episode as
    both policies did it.

    Args:
        out: the folder; a folder for each seed is made in it.
        seed: of the demonstrations and of the trainings.
        demonstrations: how many the policies learn from.
        steps: updates of each training.
        episodes: how many held-out ones each policy is tried on.
        device: where to train.
    """
    asked = {"seed": (seed, 0), "demonstrations": (demonstrations, 1), "steps": (steps, 1), "episodes": (episodes, 1)}
    for name, (count, least) in asked.items():
        if count < least:
            raise UsageError(f"--{name}: got {count}, expected {least} or more")
    import torch

    from trace_lab.collect import collect
    from trace_lab.evaluate import evaluate
    from trace_lab.train import train

    if device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(1)  # at this size a second one waits more than it works
    console, begun, place = Console(), time.perf_counter(), out / f"seed-{seed}"
    settings = tuple(f"{name}={value}" for name, value in RECIPE.items())
    first = 1_000 * seed

    def section(words: str) -> None:
        console.rule(words, align="left")

    section(f"1. {demonstrations} demonstrations of {TASK}, by the scripted expert")
    data = place / "data"
    if code := collect(TASK, out=data, episodes=demonstrations, size=SIZE, delay=DELAY, first_seed=first):
        return code
    for number, (memory, words) in enumerate(MEMORIES.items(), start=2):
        section(f"{number}. LeRobot's ACT, {words}")
        run = place / memory
        code = train(data, out=run, memory=memory, preset=PRESET, seed=seed, steps=steps, set_=settings, device=device)
        code = code or evaluate(run, task=TASK, episodes=episodes, delay=DELAY, videos=FILMS, device=device)
        if code:
            return code
    section("4. The report")
    with console.status("drawing"):
        path = report(place, seed, demonstrations)
    table = Table(*NAMES, title=f"{TASK}: {episodes} held-out episodes; a guess is right half of the time")
    for row in rows(place):
        table.add_row(*row)
    console.print(table)
    console.print(f"{time.perf_counter() - begun:.0f} s. Open {path.resolve()}", highlight=False, soft_wrap=True)
    return 0
