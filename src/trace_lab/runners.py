"""Who runs commands of ours, several at once: processes of this machine (`Here`), or Ray (`OnRay`)."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def perform(command: Sequence[str], log: Path, threads: int) -> int:
    """Runs a command of ours as a process; what it says goes to a file. Also called on other machines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {"TERM": "dumb"}  # who has set it meant it
    with log.open("a") as file:
        file.write(f"$ tracemem {' '.join(command)}\n")
        file.flush()
        words = [sys.executable, "-m", "trace_lab.cli", *command]
        return subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode


class Here(AbstractContextManager["Here"]):
    """So many processes on this machine."""

    def __init__(self, jobs: int, threads: int):
        self.threads, self.pool, self.room = threads, ThreadPoolExecutor(jobs), jobs

    def submit(self, command: Sequence[str], log: Path) -> "Future[int]":
        """Begins a command when there is room; its exit code."""
        return self.pool.submit(perform, command, log, self.threads)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)


class OnRay(AbstractContextManager["OnRay"]):
    """Ray: this machine, or a cluster whose machines share the folders and have this package."""

    def __init__(self, jobs: int, threads: int, address: str | None):
        import ray

        self.ray, self.threads = ray, threads
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        have = ray.cluster_resources()
        nodes = max(1, len([node for node in ray.nodes() if node["Alive"]]))
        self.room = jobs * nodes
        # A job takes such a share of a machine that the measured number of them fills it.
        cpus = max(1, int(have["CPU"] / nodes / jobs))
        share: Any = ray.remote(max_retries=0, num_cpus=cpus, num_gpus=1 / jobs if have.get("GPU") else 0)
        self.perform: Any = share(perform)

    def submit(self, command: Sequence[str], log: Path) -> "Future[int]":
        """Begins a command when there is room; its exit code."""
        found: Future[int] = self.perform.remote(command, log.absolute(), self.threads).future()
        return found

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()
