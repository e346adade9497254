"""Training: killed at any moment it ends where it would have ended; a run folder keeps what it has; bad input is named."""

import errno
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from trace_errors import RunError
from trace_lab import run as run_module
from trace_lab import training as training_module
from trace_lab.cli import main
from trace_lab.frames import open_dataset, open_frames
from trace_lab.policy import velocity_channels
from trace_lab.recipe import Recipe, parse, recipe
from trace_lab.run import Run, differences
from trace_lab.training import Stopped, Training, run_training

SMALL = {
    "steps": 6, "episodes": 2, "targets": 3, "checkpoint": 2, "warmup": 2, "policy.dim_model": 32, "policy.n_heads": 2,
    "policy.dim_feedforward": 32, "policy.n_encoder_layers": 1, "policy.n_vae_encoder_layers": 1, "policy.chunk_size": 8,
    "policy.n_action_steps": 4, "memory.period": 32, "memory.width": 32, "memory.hidden": 32,
}  # fmt: skip
WORDS = [f"{name}={json.dumps(value)}" for name, value in SMALL.items()]


def small(memory: str = "trace", policy: str = "act", **changes) -> Recipe:
    kept = {name: value for name, value in SMALL.items() if policy == "act" or not name.startswith("policy.")}
    if policy == "diffusion":
        kept |= {"policy.horizon": 16, "policy.n_action_steps": 4, "policy.down_dims": [32, 64]}
    return recipe("tiny", policy, memory, kept | changes)


@pytest.fixture(scope="module")
def data(dataset, tmp_path_factory) -> tuple[Path, Path]:
    """The dataset and a folder with its decoded frames."""
    return dataset, tmp_path_factory.mktemp("frames")


def test_a_run_from_before_a_field_existed_goes_on(tmp_path):
    asked = {"recipe": small(path_swap=0.0).to_dict(), "seed": 0}
    old = {"recipe": {name: x for name, x in asked["recipe"].items() if name not in {"cameras", "backbone"}}, "seed": 0}
    (tmp_path / "run.json").write_text(json.dumps({"asked": old}))
    assert Run(tmp_path)._differences(asked) == []
    assert Run(tmp_path)._differences({"recipe": small(cameras="overhead").to_dict(), "seed": 0})
    del old["recipe"]["path_swap"]  # nobody path_swap then
    (tmp_path / "run.json").write_text(json.dumps({"asked": old}))
    assert Run(tmp_path)._differences(asked) == []
    assert Run(tmp_path)._differences({"recipe": small(path_swap=0.5).to_dict(), "seed": 0})


def weights(out: Path) -> dict:
    return load_file(out / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alone(data: tuple[Path, Path], out: Path) -> multiprocessing.Process:
    """A training in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trace_lab.training"])
    child = context.Process(
        target=run_training,
        args=(data[0], out, small(jitter=0.1), 5),
        kwargs={"device": "cpu", "cache": data[1], "notes": {"task": "Cable"}},
    )
    child.start()
    return child


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory) -> Path:
    """A training that nobody disturbed."""
    out = tmp_path_factory.mktemp("run") / "straight"
    child = alone(data, out)
    child.join()
    assert child.exitcode == 0
    return out


# -- killed ----------------------------------------------------------------------------------------------------------------


def test_killed_again_and_again_it_ends_with_the_same_bits(data, straight, tmp_path):
    draw, out, kills, alive = random.Random(4), tmp_path / "killed", 0, True
    while alive:
        child = alone(data, out)
        wait_for = draw.choice(["metrics", "unfinished", "checkpoint"]) if kills < 4 else None
        before = set(out.glob("checkpoints/*"))
        while child.is_alive() and wait_for:
            now = set(out.glob("checkpoints/*"))
            if (wait_for == "unfinished" and (out / "checkpoints" / "unfinished").exists()) or now - before:
                time.sleep(draw.random() * 0.3)
                break
            time.sleep(0.002)
        if wait_for and child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.join()
        alive = child.exitcode != 0
        assert child.exitcode in (0, -signal.SIGKILL)
    assert kills >= 2
    assert same(weights(out), weights(straight))
    assert same(*(load_file(each / "checkpoints" / "000006" / "training_state" / "optimizer.safetensors")
                  for each in (out, straight)))  # fmt: skip
    assert Run(out).lines() == Run(straight).lines()


@pytest.fixture(scope="module")
def again(dataset, tmp_path_factory) -> Path:
    """The dataset collected again with the same options, in a process that orders its sets otherwise."""
    out = tmp_path_factory.mktemp("again") / dataset.name
    words = ["collect", "Cable", "--episodes", "2", "--size", "64", "--workers", "1", "--out", str(out)]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-m", "trace_lab.cli", *words], check=True, env=environment, capture_output=True)
    return out


def test_the_same_collection_is_the_same_bytes(dataset, again):
    def digests(root: Path) -> dict[str, str]:
        files = (
            path for path in root.glob("**/*") if path.is_file() and "trace_memory" not in path.parts
        )  # training's
        return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    found = digests(again)
    assert {Path(name).suffix for name in found} == {".json", ".jsonl", ".parquet", ".mp4", ".png", ".md"}
    assert found == digests(dataset)
    assert list(json.loads((again / "meta/stats.json").read_text())) == sorted(open_dataset(again).stats)


def older(straight: Path, out: Path) -> Path:
    """The run as it was after update 4."""
    shutil.copytree(straight, out, symlinks=True)
    shutil.rmtree(out / "checkpoints/000006")
    return out


def test_it_goes_on_with_data_that_were_collected_again(again, straight, tmp_path):
    out = older(straight, tmp_path / "run")
    result = run_training(again, out, small(jitter=0.1), 5, device="cpu")
    assert result.step == 6
    assert same(weights(out), weights(straight))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("file", ["pretrained_model/model.safetensors", "training_state/optimizer.safetensors"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(file, data, straight, tmp_path, capsys):
    out = shutil.copytree(straight, tmp_path / "run", symlinks=True)
    cut(out / "checkpoints/000006" / file)
    run_training(data[0], out, small(jitter=0.1), 5, device="cpu", cache=data[1])
    said = capsys.readouterr().err
    assert f"{out}/checkpoints/000006: {file} is missing or damaged" in said
    assert "It is now damaged-000006; going on from update 4" in said
    assert same(weights(out), weights(straight))
    assert Run(out).finished() == [4, 6]
    assert (out / "checkpoints/damaged-000006" / file).exists()


def test_when_no_checkpoint_is_whole_it_says_so_and_changes_nothing(data, straight, tmp_path):
    out = shutil.copytree(straight, tmp_path / "run", symlinks=True)
    cut(out / "checkpoints/000006/training_state/optimizer.safetensors")
    (out / "checkpoints/000004/pretrained_model/model.safetensors").unlink()
    with pytest.raises(RunError, match=r"000006: .*damaged .*000004: .*missing .*No other checkpoint is left"):
        run_training(data[0], out, small(jitter=0.1), 5, device="cpu")
    assert Run(out).finished() == [4, 6]


def test_seeds_and_augmentation_matter(data, straight, tmp_path):
    for name, made, seed in (("other", small(jitter=0.1), 6), ("plain", small(), 5)):
        run_training(data[0], tmp_path / name, made, seed, device="cpu", cache=data[1])
        ours, theirs = weights(tmp_path / name), weights(straight)
        assert max(float((x - theirs[n]).abs().max()) for n, x in ours.items() if x.is_floating_point()) > 1e-4


def test_a_polite_kill_saves_and_the_same_command_goes_on(data, straight, tmp_path, monkeypatch):
    real, out = Training.update, tmp_path / "stopped"

    def update(self):
        found = real(self)
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(Training, "update", update)
    with pytest.raises(Stopped):
        run_training(data[0], out, small(jitter=0.1), 5, device="cpu", cache=data[1])
    assert Run(out).finished()[-1] == 3
    monkeypatch.setattr(Training, "update", real)
    result = run_training(data[0], out, small(jitter=0.1), 5, device="cpu", cache=data[1])
    assert result.step == 6
    ours, theirs = weights(out), weights(straight)
    assert max(float((x - theirs[n]).abs().max()) for n, x in ours.items() if x.is_floating_point()) < 1e-6
    again = run_training(data[0], out, small(jitter=0.1), 5, device="cpu", cache=data[1])
    assert again.step == 6
    assert same(weights(out), ours)


# -- what comes out --------------------------------------------------------------------------------------------------------


def test_the_folder_of_a_run(straight):
    note = json.loads((straight / "run.json").read_text())
    memory = note["memory"]  # in full, also what nobody asked for
    assert (memory["name"], memory["width"], memory["dropout"]) == ("trace", 32, 0.1)
    assert memory["velocity_channels"] == [0, 1, 2]  # told by the names of the dataset's channels
    assert note["task"] == "Cable"
    assert note["seed"] == 5
    assert note["asked"]["recipe"]["jitter"] == 0.1
    assert set(note["versions"]) == {"lerobot_policy_trace", "lerobot", "torch"}
    assert [path.name for path in sorted((straight / "checkpoints").iterdir())] == ["000004", "000006", "last"]
    assert (straight / "checkpoints" / "last").resolve().name == "000006"
    (line,) = Run(straight).lines()  # of the last update, however few there are
    assert line["step"] == 6
    assert {"loss", "gradient", "l1_loss"} <= set(line)
    assert (straight / "curves.png").stat().st_size > 1000


def test_lerobot_loads_the_checkpoint_and_the_suite_scores_it(straight, tmp_path):
    words = ["eval", str(straight), "--episodes", "1", "--limit", "6", "--workers", "1", "--out", str(tmp_path / "e")]
    assert main(words) == 0
    line = json.loads((tmp_path / "e" / "evaluation.jsonl").read_text())
    assert (line["policy"], line["memory"], line["training_seed"], line["checkpoint_step"]) == ("act", "trace", 5, 6)


@pytest.mark.parametrize(
    ("policy", "memory", "changes"),
    [
        ("act", "none", {}),
        ("act", "gru", {}),
        ("act", "paper", {"scan": "budget", "memory.period": 1, "memory.history_frames": 4, "memory.paper.depth": 2}),
        ("diffusion", "trace", {}),
        ("diffusion", "none", {}),
    ],
)
def test_every_way_of_training_changes_the_weights(data, tmp_path, policy, memory, changes):
    out = tmp_path / "run"
    made = small(memory, policy, **({"steps": 2, "checkpoint": 1} | changes))
    run_training(data[0], out, made, 0, device="cpu", cache=data[1])
    first, last = (
        load_file(out / "checkpoints" / step / "pretrained_model" / "model.safetensors")
        for step in ("000001", "000002")
    )
    assert all(torch.isfinite(x).all() for x in last.values())
    assert any(not torch.equal(first[name], last[name]) for name in first)
    if memory != "none":
        assert any(not torch.equal(first[n], last[n]) for n in first if n.startswith("memory_head.memory."))


def test_loss_falls(data):
    torch.set_num_threads(1)
    store = open_frames(open_dataset(data[0]), "cpu", cache=data[1])
    made = small(steps=40, warmup=1, lr=1e-3, backbone_lr=1e-3, memory_lr=1e-3, **{"memory.period": 64})
    training = Training.begin(made, 0, store, Accelerator(cpu=True))
    losses = [float(training.update()["l1_loss"]) for _ in range(16)]
    assert sum(losses[-4:]) < 0.85 * sum(losses[:4])
    for module in training.policy.modules():  # nothing was put in the place of anything
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_two_processes_train_what_one_trains(data, tmp_path):
    """Without noise, so that only the split could make a difference."""
    quiet = [
        "policy.dropout=0.0",
        "policy.use_vae=false",
        "memory.dropout=0.0",
        "path_swap=0.5",
        "steps=3",
        "checkpoint=3",
    ]
    common = [str(data[0]), "--preset", "tiny", "--device", "cpu", "--cache", str(data[1]), "--set", *WORDS, *quiet]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    words = [sys.executable, *launch, "trace_lab.cli", "train", *common, "--out", str(tmp_path / "two")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert main(["train", *common, "--out", str(tmp_path / "one")]) == 0
    two, one = weights(tmp_path / "two"), weights(tmp_path / "one")
    start = small(**parse(quiet))
    store = open_frames(open_dataset(data[0]), "cpu", cache=data[1])
    begun = Training.begin(start, 0, store, Accelerator(cpu=True)).policy.state_dict()
    # by norm: where a gradient is all but nothing, Adam makes a full step of a difference in rounding
    kept = [name for name in one if one[name].is_floating_point()]
    moved = torch.cat([(one[name] - begun[name]).flatten() for name in kept]).norm()
    apart = torch.cat([(one[name] - two[name]).flatten() for name in kept]).norm()
    assert apart < 0.02 * moved, f"{float(apart / moved):.4f}"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["base_vx", "base_vy", "base_yaw_rate", "arm_x", "gripper"], [0, 1, 2]),
        (["x.vel", "theta.vel", "shoulder_pan.pos", "wheel speed", "velvet"], [0, 1, 3]),
        ({"motors": ["joint_1", "joint_1_velocity", "vx1"]}, [1, 2]),
        ({"axes": ["x", "y"]}, []),
        (None, []),
    ],
)
def test_channels_that_are_velocities_are_told_by_their_names(names, found):
    assert velocity_channels(SimpleNamespace(features={"observation.state": {"names": names}})) == found


def test_training_knows_nothing_of_the_suite():
    for name in ("recipe", "source", "frames", "sampling", "features", "policy", "training", "train", "run"):
        text = Path(training_module.__file__).with_name(f"{name}.py").read_text()
        assert "import trace_bench" not in text
        assert "from trace_bench" not in text
        assert "trace_lab.dataset" not in text


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_preset_is_refused_and_left_alone(data, straight, capsys):
    before = {path: path.read_bytes() for path in straight.glob("**/*") if path.is_file()}
    with pytest.raises(
        RunError, match=r"run of other settings \(recipe\.lr was 0\.0003, now 0\.01\)\. Nothing was changed"
    ):
        run_training(data[0], straight, small(jitter=0.1, lr=0.01), 5, device="cpu", cache=data[1])
    assert main(["train", str(data[0]), "--out", str(straight), "--preset", "paper", "--device", "cpu"]) == 1
    assert "run of other settings" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in straight.glob("**/*") if path.is_file()} == before


def test_a_dataset_that_changed_since_is_refused(data, straight, tmp_path):
    shutil.copytree(data[0], tmp_path / "cable")
    stats = tmp_path / "cable" / "meta" / "stats.json"
    stats.write_text(stats.read_text() + "\n")
    with pytest.raises(RunError, match=r"other settings \(dataset\.meta/stats\.json was"):
        run_training(tmp_path / "cable", straight, small(jitter=0.1), 5, device="cpu")


def test_a_folder_with_other_things_is_refused(data, tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(RunError, match=r"is not empty and has no run\.json"):
        run_training(data[0], tmp_path, small(), 0, device="cpu")
    assert [path.name for path in tmp_path.iterdir() if path.name != "lock"] == ["precious"]


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_made_is_named(data, tmp_path, capsys, place):
    (tmp_path / "file").touch()
    out = tmp_path / place
    assert main(["train", str(data[0]), "--out", str(out), "--device", "cpu", "--preset", "tiny"]) == 1
    said = capsys.readouterr().err
    assert f"--out {out}: cannot be created" in said
    assert "Traceback" not in said


def test_a_run_json_that_cannot_be_read_is_named(data, tmp_path):
    (tmp_path / "run.json").write_text('{"asked": ')
    with pytest.raises(RunError, match=r"run\.json: cannot be read .*, expected that of a run"):
        run_training(data[0], tmp_path, small(), 0, device="cpu")


def test_one_training_at_a_time(data, straight):
    with Run(straight).locked(), pytest.raises(RunError, match="another tracemem train is at work there"):
        run_training(data[0], straight, small(jitter=0.1), 5, device="cpu")


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    run = Run(tmp_path / "run")
    run.begin({"seed": 1})
    run.save(2, lambda folder: (folder / "x").write_text("2") and None)

    def full(folder):
        (folder / "x").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        RunError, match=r"checkpoint of update 4 could not be written .*No space left.*update 2 is intact"
    ):
        run.save(4, full)
    assert run.finished() == [2]
    assert (run.checkpoints / "last" / "x").read_text() == "2"
    assert not (run.checkpoints / "unfinished").exists()
    for step in (4, 6, 8):
        run.save(step, lambda folder: (folder / "x").write_text("more") and None)
    assert run.finished() == [6, 8]


def test_what_a_kill_may_leave_is_mended(tmp_path):
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    for name in ("lock", "run.json.123"):
        (run.folder / name).touch()
    run.begin({"seed": 1})
    for step in (2, 4):
        run.save(step, lambda folder: (folder / "x").write_text("x") and None)
    (run.checkpoints / "last").unlink()
    (run.checkpoints / "last").symlink_to("000002")  # killed after the checkpoint, before the link
    run.begin({"seed": 1})
    assert (run.checkpoints / "last").resolve().name == "000004"
    with pytest.raises(RunError, match="seed was 1, now 2"):
        run.begin({"seed": 2})
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="is a file, expected a folder"):
        Run(tmp_path / "file").check({})


def test_pytorchs_own_error_of_a_full_disk_is_one_too(tmp_path):
    run = Run(tmp_path / "run")
    run.begin({})

    def full(_):
        raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file")

    with pytest.raises(RunError, match=r"update 2 could not be written .*; there is none yet"):
        run.save(2, full)
    assert list(run.checkpoints.iterdir()) == []


def test_lines_of_updates_that_are_done_again_are_dropped(tmp_path):
    run = Run(tmp_path / "run")
    run.begin({})
    for step in (20, 40, 60):
        run.log({"step": step, "loss": 1.0})
    with run.metrics.open("a") as file:
        file.write('{"step": 80, "lo')
    run.forget_after(40)
    assert run.lines() == [{"step": 20, "loss": 1.0}, {"step": 40, "loss": 1.0}]
    run.draw()
    assert (run.folder / "curves.png").stat().st_size > 1000


def test_differences_are_told_by_name():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ["a.c was 2, now 3"]
    assert differences({"a": 1}, {"a": 1, "d": 4}) == ["d was None, now 4"]


def test_a_loss_that_is_no_number_stops_before_it_is_saved(data, tmp_path, monkeypatch):
    real = Training.update

    def update(self):
        found = real(self)
        return found | {"loss": torch.tensor(float("nan"))} if self.step == 4 else found

    monkeypatch.setattr(Training, "update", update)
    with pytest.raises(RunError, match="the loss became nan at update 4"):
        run_training(data[0], tmp_path / "run", small(), 0, device="cpu", cache=data[1])
    assert Run(tmp_path / "run").finished() == [2]


def test_too_large_a_batch_says_what_to_do(data, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has less")

    monkeypatch.setattr(training_module.Accelerator, "backward", full)
    with pytest.raises(RunError, match=r"update 1: CUDA out of memory\. Less at once: --set episodes=4"):
        run_training(data[0], tmp_path / "run", small(), 0, device="cpu", cache=data[1])
    monkeypatch.undo()
    less = small(targets=1, steps=1)  # a run that came to nothing may be replaced
    assert run_training(data[0], tmp_path / "run", less, 0, device="cpu", cache=data[1]).step == 1


def test_no_dataset_no_folder(tmp_path, capsys):
    assert main(["train", str(tmp_path / "nothing"), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 1
    assert "no meta/info.json there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_commit_is_noted_where_there_is_one(tmp_path, monkeypatch):
    assert run_module.commit() is None or len(run_module.commit().rstrip("+")) == 40
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "run.py"))
    assert run_module.commit() is None


def test_a_gpu_that_is_not_there_is_named(data, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RunError, match="device: got 'cuda', but PyTorch finds no GPU"):
        run_training(data[0], tmp_path / "run", small(), 0, device="cuda")
