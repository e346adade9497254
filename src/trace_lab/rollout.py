"""Many episodes of the suite at once: environments in worker processes (`Rows`), a LeRobot policy with its pipelines that
acts for all of them together (`PolicyRunner`), and the loop between the two (`play`). What becomes of the score sheets is
the business of `evaluate`.
"""

import json
import multiprocessing
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from numpy.typing import NDArray

from trace_bench.env import BenchEnv, Observation, make
from trace_bench.robot import CHANNELS
from trace_errors import ControlError, SimulationError, UsageError
from trace_lab.dataset import begin_worker
from trace_lab.films import Film

PATIENCE = 10.0  # seconds a worker has to end by itself
Build = Callable[[], BenchEnv]  # must survive pickling


def device_of(asked: str) -> str:
    """The device behind a --device option: auto takes a GPU if there is one."""
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: got cuda, but PyTorch finds none here; expected cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


@dataclass(frozen=True)
class Episodes:
    """The episodes of an evaluation: a task, how its scenes are drawn, and which seeds."""

    task: str
    split: str
    profile: str
    delay: int | None  # None: the environment's own, as for the limit
    limit: int | None
    cue: int | None  # None: the seed's
    first_seed: int
    episodes: int
    size: int = 96
    cameras: tuple[str, ...] = ()

    def make(self, renders: Callable[[int], bool] | None = None) -> BenchEnv:
        """An environment that plays them."""
        return make(
            self.task, split=self.split, profile=self.profile, delay=self.delay, limit=self.limit, size=self.size,
            cameras=self.cameras, renders=renders,
        )  # fmt: skip


class Begin(NamedTuple):
    """The command to begin an episode, with the seed's cue or another. A film is named after the path given here, its
    outcome and `.mp4`.
    """

    seed: int
    film: Path | None = None
    cue: int | None = None


Command = NDArray[np.float32] | Begin | None  # an action; a new episode; stand still


class Row:
    """One environment, and a film of its episode where one is wanted."""

    def __init__(self, env: BenchEnv):
        self.env = env
        self.film: Film | None = None

    def do(self, command: Command) -> tuple[Observation | None, str]:
        """Carries out a command. Returns what is seen then (None: as before), and the score sheet if the episode ended."""
        if command is None:
            return None, ""
        if isinstance(command, Begin):
            cue = {} if command.cue is None else {"cue": command.cue}
            observation, info = self.env.reset(seed=command.seed, options=cue)
            self.film = None if command.film is None else Film(command.film, self.env.profile.rate)
        else:
            observation, _, _, _, info = self.env.step(command)
        sheet: str = info["scoring"]["record"]
        if self.film is not None:
            self.film.add(self.env.render())
            if sheet:
                self.film.finish(json.loads(sheet)["outcome"])
        return observation, sheet


def serve(pipe: Connection, build: Build, places: Sequence[int], memory: Any) -> None:
    """What a worker does: rounds of commands for its rows, until the pipe is closed. It answers with a list of score sheets,
    or with the text of an error.
    """
    begin_worker(threading.Event())
    rows: list[Row] = []
    try:
        rows += [Row(build()) for _ in places]
        while True:
            sheets = []
            for row, place, command in zip(rows, places, pipe.recv(), strict=True):
                observation, sheet = row.do(command)
                if observation is not None:
                    write_to_shared_memory(row.env.observation_space, place, observation, memory)  # type: ignore[arg-type]
                sheets.append(sheet)
            pipe.send(sheets)
    except (EOFError, ConnectionError):  # the main process is gone
        pass
    except SimulationError as error:
        pipe.send(str(error))
    except Exception:
        pipe.send(traceback.format_exc())
    finally:
        for row in rows:
            row.env.close()


class Rows:
    """Environments in worker processes, several in each if there are more rows than workers. `observation` holds one array
    for each thing observed, of all rows, and changes with every round: copy what must stay.
    """

    def __init__(self, build: Build, count: int, workers: int):
        space, self.count = build().observation_space, count
        context = multiprocessing.get_context("forkserver")  # GL does not survive a fork
        self._memory = create_shared_memory(space, count, context)  # type: ignore[arg-type]
        self.observation: Observation = read_from_shared_memory(space, self._memory, count)  # type: ignore[assignment]
        self._workers: list[tuple[Any, Connection]] = []
        for number in range(workers):
            mine, theirs = context.Pipe()
            places = range(number, count, workers)
            process = context.Process(target=serve, args=(theirs, build, places, self._memory), daemon=True)
            process.start()
            theirs.close()  # so that the end of the worker is seen here
            self._workers.append((process, mine))

    def do(self, commands: Sequence[Command]) -> list[str]:
        """One round of all rows at the same time. Returns a score sheet for each that ended its episode, else ''."""
        sheets, number = [""] * self.count, 0
        try:
            for number, (_, pipe) in enumerate(self._workers):
                pipe.send(list(commands[number :: len(self._workers)]))
            for number, (_, pipe) in enumerate(self._workers):
                reply = pipe.recv()
                if isinstance(reply, str):
                    raise SimulationError(reply.strip())
                sheets[number :: len(self._workers)] = reply
        except (EOFError, ConnectionError) as error:
            process, _ = self._workers[number]
            process.join(PATIENCE)
            raise SimulationError(f"a worker died with exit code {process.exitcode} (out of memory?)") from error
        return sheets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()


class PolicyRunner:
    """A LeRobot policy with its pre- and postprocessor, acting for many rows.

    Our policies notice by `episode_step` which rows begin an episode. Stock policies, and a temporal ensemble, have one
    queue for all rows: `together` says that rows must begin together, after a reset.
    """

    def __init__(self, policy: Any, before: Any, after: Any):
        self.policy, self.before, self.after = policy, before, after
        ensemble = getattr(policy.config, "temporal_ensemble_coeff", None) is not None
        self.together = ensemble or not policy.config.type.startswith("trace_")

    def reset(self) -> None:
        """All rows begin anew."""
        self.policy.reset()

    def act(self, observation: Observation) -> NDArray[np.float32]:
        """Actions (rows, 17) for what all rows observe. Rows are independent, except that Diffusion Policy draws the noise
        of all of them at once: its actions depend on the number of rows and on their order.
        """
        import torch

        with torch.inference_mode():
            actions = self.after(self.policy.select_action(self.before(self.batch(observation))))
        found: NDArray[np.float32] = actions.float().cpu().numpy()
        return found

    def batch(self, observation: Observation) -> dict[str, Any]:
        """A copy of the observation under LeRobot's names. Pictures travel as bytes and become numbers on the device."""
        import torch

        batch = {
            "observation.state": torch.tensor(observation["agent_pos"]),
            "observation.episode_step": torch.tensor(observation["episode_step"], dtype=torch.float32),
        }
        for camera, pictures in observation.get("pixels", {}).items():
            moved = torch.from_numpy(pictures).to(self.policy.config.device).permute(0, 3, 1, 2)
            batch[f"observation.images.{camera}"] = moved.contiguous().float() / 255
        return batch


@dataclass
class Meter:
    """Counts control steps of all rows, and calls of the policy with the seconds they took."""

    steps: int = 0
    calls: int = 0
    policy_seconds: float = 0.0

    def count(self, rows: int, seconds: float) -> None:
        """One call of the policy, for so many rows that play."""
        self.steps += rows
        self.calls += 1
        self.policy_seconds += seconds


def play(rows: Rows, runner: PolicyRunner, episodes: Iterable[Begin], meter: Meter) -> Iterator[list[dict[str, Any]]]:
    """Plays all episodes. Yields after every round the score sheets of those that ended in it, mostly none.

    A row whose episode has ended begins the next one in the following round, while the others go on; meanwhile the policy
    gets its last observation, and that action is not used. With no episodes left, or where all must begin together, the row
    waits.
    """
    waiting, playing = deque(episodes), dict[int, Begin]()
    while waiting or playing:
        commands: list[Command] = [None] * rows.count
        if playing:
            started = time.perf_counter()
            actions = runner.act(rows.observation)
            meter.count(len(playing), time.perf_counter() - started)
            for row, episode in playing.items():
                if not (good := np.isfinite(actions[row])).all():
                    where = f"seed {episode.seed}, step {rows.observation['episode_step'][row, 0]}"
                    bad = ", ".join(np.array(CHANNELS)[~good])
                    raise ControlError(f"action: not finite in {bad} ({where}), expected finite numbers")
                commands[row] = actions[row]
        else:
            runner.reset()
        if not playing or not runner.together:
            for row in sorted(set(range(rows.count)) - set(playing))[: len(waiting)]:
                commands[row] = playing[row] = waiting.popleft()
        sheets = rows.do(commands)
        playing = {row: episode for row, episode in playing.items() if not sheets[row]}
        yield [json.loads(sheet) for sheet in sheets if sheet]
