"""The dataset card: README.md of a collected dataset, with the header that dataset hubs read."""

import inspect
import sys
from collections import Counter
from typing import Any

from trace_bench.env import BenchEnv
from trace_lab.dataset import SHEET, Finished, Settings

HEADER = """---
license: apache-2.0
task_categories:
- robotics
tags:
- LeRobot
- trace_bench
configs:
- config_name: default
  data_files: data/*/*.parquet
---
"""


def card(settings: Settings, env: BenchEnv, finished: Finished, rows: list[dict[str, Any]], command: str) -> str:
    """The text of the card. `rows` are the score sheets."""
    about = " ".join((inspect.getdoc(sys.modules[type(env.bench).__module__]) or "").split())
    counts = Counter(row["cue"] for row in rows)
    cues = "\n".join(f"| {cue} | {counts[number]} |" for number, cue in enumerate(env.bench.cues))
    frames = sum(row["steps"] for row in rows)
    left_out = len(finished.failed)
    gone = sorted(row["decisions"][0]["frame"] - row["cue_gone"] for row in rows)
    return f"""{HEADER}
# trace_bench {settings.task}, {settings.split} split

{about}

The scripted expert of the simulated suite `trace_bench` did the task {len(rows)} times ({frames} frames at
{env.profile.rate} a second). The instruction is the same in every episode, whatever the cue: "{env.task_description}"
From the moment the cue is gone to the first branch an episode takes {gone[0]} to {gone[-1]} control steps
({gone[len(gone) // 2]} in the middle).

| cue | episodes |
|---|---|
{cues}

![moments of one episode for each cue](pictures/contact_sheet.png)

## What is in it

| feature | what it is |
|---|---|
| `observation.state` | 17 numbers: velocities of the base, then six joints and a gripper for the left and the right arm |
| `action` | the same 17 channels, as commanded |
| `observation.images.overhead`, `left_wrist`, `right_wrist` | pictures of {settings.size} x {settings.size}, H.264 video |
| `task` | the instruction |

Frame t holds what was observed before action t. The cue, the branches and the stages are not features, because a policy must
not see them. The score sheet of every episode is in `{SHEET}`, for analysis only: the cue, when it was gone, when each
branch was open and decided, when each stage succeeded. `pictures/` has a video of one episode for each cue.

## Splits

`train` and `heldout` episodes draw light, surfaces, distractors and object instances from sets that have nothing in common.
This is the {settings.split} split, profile `{settings.profile}`, seeds {settings.first_seed} to \
{settings.first_seed + finished.attempts - 1}. Stored are the {len(rows)} episodes in which the expert completed every stage;
{left_out} {"was" if left_out == 1 else "were"} left out.

## How it was made

```
{command}
```

The same command gives the same episodes.

## How to load it

```python
from lerobot.datasets.lerobot_dataset import LeRobotDataset

dataset = LeRobotDataset("{settings.repo_id}", root="path/to/this/folder")
```
"""
