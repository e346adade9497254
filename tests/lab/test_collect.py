"""`tracemem collect` on the shortest task, small. One uninterrupted dataset is made once, the others are compared to it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from trace_bench.robot import CAMERAS, CHANNELS
from trace_errors import ControlError, SimulationError
from trace_lab import collect as command
from trace_lab import dataset as disk
from trace_lab import films
from trace_lab.cli import main

SIZE = 32
SETTINGS = disk.Settings("Cable", "train", SIZE, "default", 20, 0)
FRAME = ("observation.state", "action")


def run(out, episodes, *options, workers="1"):
    words = ["collect", "Cable", "--episodes", str(episodes), "--size", str(SIZE), "--delay", "20", "--out", str(out)]
    return main([*words, "--workers", workers, *options])


def opened(out):
    return LeRobotDataset("trace_bench/cable", root=out)


def columns(out):
    return pd.concat([pd.read_parquet(path) for path in sorted(Path(out).glob("data/*/*.parquet"))], ignore_index=True)


def videos(out):
    return {path.relative_to(out): path.read_bytes() for path in sorted(Path(out).glob("videos/**/*.mp4"))}


def pixels(path):
    with av.open(str(path)) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def same_videos(one, other):
    """Encoders do not promise the same bytes twice."""
    assert set(videos(one)) == set(videos(other))
    for name in videos(one):
        assert np.abs(pixels(one / name).astype(int) - pixels(other / name)).mean() < 0.2
    return True


def snapshot(out):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(Path(out).rglob("*"))}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    out = tmp_path_factory.mktemp("collect") / "cable"
    assert run(out, 3) == 0
    return out


@pytest.fixture(scope="module")
def resimulated():
    env = SETTINGS.env()
    episodes = []
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        rows = []
        for exact in env.expert():
            action = exact.astype(np.float32)
            rows.append((observation["agent_pos"], action, observation["pixels"]))
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
        episodes.append((rows, env.record.to_dict()))
    env.close()
    return episodes


@pytest.fixture
def no_film(monkeypatch):
    """Playing an episode again for a video takes as long as recording it."""

    def film(settings, row, path):
        path.write_bytes(b"")
        return [np.zeros((2, 2, 3), np.uint8) for _ in films.moments(row)]

    monkeypatch.setattr(films, "film", film)


def test_what_is_in_a_dataset(three):
    dataset = opened(three)
    features = dataset.meta.features
    ours = {*FRAME, *(f"observation.images.{camera}" for camera in CAMERAS)}
    assert set(features) == ours | {
        "timestamp",
        "frame_index",
        "episode_index",
        "index",
        "task_index",
    }  # no cue, no branch
    for name in FRAME:
        assert (features[name]["dtype"], tuple(features[name]["shape"])) == ("float32", (17,))
        assert features[name]["names"] == list(CHANNELS)
    for camera in CAMERAS:
        feature = features[f"observation.images.{camera}"]
        assert (feature["dtype"], tuple(feature["shape"])) == ("video", (SIZE, SIZE, 3))
        assert feature["names"] == ["height", "width", "channels"]
    assert (dataset.fps, dataset.meta.robot_type, dataset.num_episodes) == (10, "trace_bench", 3)
    assert dataset[0]["task"] == SETTINGS.env(cameras=()).task_description
    assert len(dataset.meta.tasks) == 1
    assert not (three / ".collect").exists()


def test_frames_are_those_of_the_simulation(three, resimulated):
    dataset, table = opened(three), columns(three)
    assert [len(rows) for rows, _ in resimulated] == list(dataset.meta.episodes["length"])
    errors = []
    for number, (rows, _) in enumerate(resimulated):
        mine = table[table["episode_index"] == number]
        assert list(mine["frame_index"]) == list(range(len(rows)))
        np.testing.assert_array_equal(np.stack(list(mine["observation.state"])), np.stack([row[0] for row in rows]))
        np.testing.assert_array_equal(np.stack(list(mine["action"])), np.stack([row[1] for row in rows]))
        for step in (0, len(rows) // 3, len(rows) // 2, len(rows) - 1):
            item = dataset[int(mine.index[step])]
            for camera, drawn in rows[step][2].items():
                stored = item[f"observation.images.{camera}"].permute(1, 2, 0).numpy() * 255
                errors.append(np.abs(stored - drawn).mean())
    assert np.mean(errors) < 3
    assert max(errors) < 5


def test_score_sheets_stand_beside_the_dataset(three, resimulated):
    rows = disk.sheets(three)
    assert rows == [json.loads(json.dumps({"episode_index": i} | record)) for i, (_, record) in enumerate(resimulated)]
    assert {row["cue"] for row in rows} == {0, 1}


def test_card_and_pictures(three):
    text = (three / "README.md").read_text()
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert "- LeRobot" in text
    assert "tracemem collect Cable --episodes 3 --out cable --size 32 --delay 20" in text
    assert str(three.parent) not in text
    assert (three / "pictures" / "contact_sheet.png").stat().st_size > 30_000
    lengths = {row["cue"]: row["steps"] for row in reversed(disk.sheets(three))}
    for cue, name in enumerate(("left_reel", "right_reel")):
        frames = pixels(three / "pictures" / f"{name}.mp4")
        assert len(frames) == lengths[cue] + 1
        assert frames[0].shape == (256, 384, 3)
        assert frames[0].std() > 20
        assert np.abs(frames[0].astype(int) - frames[len(frames) // 2]).mean() > 1


def test_goes_on_after_a_kill_and_gives_the_same(three, tmp_path, capsys, no_film):
    out = tmp_path / "cable"
    work = out / ".collect"
    disk.write_json(work / "settings.json", vars(SETTINGS))
    disk.record(SETTINGS, 1, work)  # a worker was quicker than the one of episode 0
    shutil.copytree(work / "episode_000001", work / "episode_000002.tmp")
    next((work / "episode_000002.tmp").glob("data/*/*.parquet")).write_bytes(b"half a file")
    finished = snapshot(work / "episode_000001")
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "record", lambda *job, real=disk.record: recorded.append(job[1]) or real(*job))
        patch.setattr(disk, "tidy", lambda out, real=disk.tidy: real(out) or recorded.append(snapshot(work)))
        assert run(out, 3, "--json") == 0
    assert recorded[1:] == [0, 2]
    assert set(finished) <= set(recorded[0])
    assert not any(path.suffix == ".tmp" for path in recorded[0])
    assert json.loads(capsys.readouterr().out)[0]["episodes"] == 3
    pd.testing.assert_frame_equal(columns(out), columns(three))
    assert same_videos(out, three)
    assert disk.sheets(out) == disk.sheets(three)
    assert len(opened(out)) == len(opened(three))


def test_a_finished_folder_is_left_alone_extended_or_refused(three, tmp_path, capsys, no_film, monkeypatch):
    out = tmp_path / "cable"
    assert run(out, 2) == 0
    before = snapshot(out)
    for fewer in (1, 2):
        assert run(out, fewer) == 0
        assert "nothing to do" in capsys.readouterr().out
    for options, field, found, asked in (
        (["--split", "heldout"], "split", "'train'", "'heldout'"),
        (["--first-seed", "7"], "first_seed", "0", "7"),
        (["--profile", "paper"], "profile", "'default'", "'paper'"),
    ):
        assert run(out, 3, *options) == 1
        assert f"{field}: found {found}, asked for {asked}" in capsys.readouterr().err
    assert main(["collect", "Laundry", "--size", "32", "--out", str(out)]) == 1
    assert "task: found 'Cable', asked for 'Laundry'" in capsys.readouterr().err
    with monkeypatch.context() as later:
        later.setitem(disk.TASKS, "Cable", replace(disk.TASKS["Cable"], version=4))
        assert run(out, 3) == 1
        assert "suite: found 3, asked for 4" in capsys.readouterr().err
    assert snapshot(out) == before

    assert run(out, 3) == 0
    pd.testing.assert_frame_equal(columns(out), columns(three))
    assert disk.sheets(out) == disk.sheets(three)
    longer, whole = opened(out), opened(three)
    assert same_videos(out, three)
    for index in (0, len(whole) // 2, len(whole) - 1):
        assert longer[index]["timestamp"] == whole[index]["timestamp"]
        for camera in CAMERAS:
            key = f"observation.images.{camera}"
            assert (longer[index][key] - whole[index][key]).abs().mean() < 1 / 255
    assert json.loads((out / disk.SETTINGS).read_text())["episodes"] == 3
    assert not (out / ".collect").exists()


def test_a_move_into_place_can_be_interrupted_anywhere(three, tmp_path, monkeypatch):
    """Whatever is killed during the last moves, the next run ends them."""
    real, names = Path.rename, ["data", "videos", "pictures", "README.md", "meta"]
    for moves in range(2 * len(names) + 1):
        out = tmp_path / str(moves)
        shutil.copytree(three, out)  # the older dataset, to be replaced
        (out / "README.md").write_text("old")
        shutil.copytree(three, out / ".collect" / "merged")
        disk.write_json(out / ".collect" / "settings.json", vars(SETTINGS))
        left = moves

        def rename(self, target):
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            disk.install(out)
        monkeypatch.setattr(Path, "rename", real)
        assert run(out, 3) == 0
        assert not (out / ".collect").exists()
        assert (out / "README.md").read_text() == (three / "README.md").read_text()
        assert videos(out) == videos(three)
        assert disk.sheets(out) == disk.sheets(three)


def test_episodes_the_expert_does_not_complete_are_left_out(tmp_path, monkeypatch, capsys, no_film):
    """Seed 0 fails: seeds 1, 2 are stored, and its number is kept for the card and for later."""
    out = tmp_path / "cable"

    def play(env, seed, real=disk.play):
        for step, frame in enumerate(real(env, seed)):
            if seed == 0 and step == 10:
                raise ControlError("the left hand cannot reach it")
            yield frame

    monkeypatch.setattr(disk, "play", play)
    assert run(out, 2) == 0
    printed = capsys.readouterr().out
    assert "1 not stored" in printed
    assert "(seeds [0])" in printed
    assert [row["seed"] for row in disk.sheets(out)] == [1, 2]
    assert [row["episode_index"] for row in disk.sheets(out)] == [0, 1]
    assert json.loads((out / disk.SETTINGS).read_text())["attempts"] == 3


def test_a_full_disk_is_said_and_keeps_what_is_finished(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cable"

    def add_frame(self, frame, real=LeRobotDataset.add_frame):
        if self.root.name == "episode_000001.tmp" and self.writer.episode_buffer["size"] == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, frame)

    monkeypatch.setattr(LeRobotDataset, "add_frame", add_frame)
    assert run(out, 2) == 1
    message = capsys.readouterr().err
    assert "the disk is full. Finished episodes: 1." in message
    assert f"tracemem collect Cable --episodes 2 --out {out} --size 32 --delay 20" in message
    assert [path.name for path in sorted((out / ".collect").glob("episode_*"))] == ["episode_000000"]
    assert len(opened(out / ".collect" / "episode_000000")) == disk.attempts(out / ".collect")[0].steps
    assert command.disk_full(RuntimeError("Encoder thread failed: [Errno 28] No space left on device"))
    assert not command.disk_full(RuntimeError("something else"))


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    assert main(["collect", "--all", "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "MB needed" in message
    assert "1.0 MB free" in message
    assert not (tmp_path / "out").exists()


def test_workers_ctrl_c_and_going_on(three, tmp_path, no_film):
    """Two processes; stopped when the first episode is there, then finished by the command that it printed."""
    out = tmp_path / "cable"
    words = [sys.executable, "-m", "trace_lab.cli", "collect", "Cable", "--episodes", "3", "--size", str(SIZE)]
    words += ["--delay", "20", "--workers", "2", "--out", str(out)]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a background job ignores it, and so would this
    )
    deadline = time.monotonic() + 120
    while not list(out.glob(".collect/episode_*[0-9]")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the workers too
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert f"tracemem collect Cable --episodes 3 --out {out}" in said
    assert not list(out.glob(".collect/*.tmp"))
    assert run(out, 3) == 0
    pd.testing.assert_frame_equal(columns(out), columns(three))
    assert same_videos(out, three)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["Cabel"], 2, "there is no task 'Cabel'; did you mean 'Cable'?"),
        ([], 2, "name one task, or --all"),
        (["Cable", "--all"], 2, "'Cable' or --all, not both"),
        (["Cable", "--episodes", "0"], 2, "--episodes: got 0"),
        (["Cable", "--workers", "0"], 2, "--workers: got 0"),
        (["Cable", "--first-seed", "-1"], 2, "--first-seed: got -1"),
        (["Cable", "--size", "2"], 2, "size: got 2, expected 8 to 960 pixels"),
        (["Cable", "--delay", "-5"], 2, "delay: got -5"),
    ],
)
def test_bad_options_are_named(words, code, message, tmp_path, capsys):
    assert main(["collect", *words, "--out", str(tmp_path / "out")]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_else_is_not_touched(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert run(tmp_path, 2) == 1
    assert "is not empty and was not made by tracemem collect" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert run(tmp_path / "notes.txt", 2) == 1
    assert "is a file" in capsys.readouterr().err


def test_two_collections_do_not_share_a_folder(tmp_path, capsys):
    with command.locked(tmp_path / "out" / ".collect"):
        assert run(tmp_path / "out", 2) == 1
    assert "another tracemem collect is at work there" in capsys.readouterr().err


def test_no_gl_is_said(tmp_path, monkeypatch, capsys):
    def record(*job):
        raise SimulationError("no picture could be drawn; apt-get install -y libegl1")

    monkeypatch.setattr(disk, "record", record)
    assert run(tmp_path / "out", 2) == 1
    assert "tracemem collect: no picture could be drawn; apt-get" in capsys.readouterr().err


def test_nothing_is_left_outside_the_folder(tmp_path):
    """LeRobot reads tables through a cache in the home folder; what it keeps of shards is not left there, nor elsewhere."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    words = [sys.executable, "-m", "trace_lab.cli", "collect", "Signal", "--episodes", "1", "--size", "16"]
    words += ["--delay", "0", "--workers", "1", "--out", str(tmp_path / "out")]
    places = {"HOME": str(home), "TMPDIR": str(temporary)}
    places |= {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", *places))}
    done = subprocess.run(words, env=places, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not [path for path in temporary.rglob("*") if path.suffix == ".arrow" or path.name.startswith("tracemem-")]
    assert not list(home.rglob("*.arrow"))


def test_an_environment_is_used_again_and_a_flag_ends_a_recording(tmp_path):
    """What a worker process keeps is one object."""
    recorder, flag = disk.Recorder(), threading.Event()
    env = recorder.env(SETTINGS)
    assert recorder.env(SETTINGS) is env
    assert recorder.env(replace(SETTINGS, delay=30)) is not env
    recorder.obey(flag)
    flag.set()
    with pytest.raises(SimulationError, match="given up"):
        recorder.record(SETTINGS, 0, tmp_path / "shard")


def test_all_has_the_papers_counts(tmp_path):
    plans = command.plans_of(None, None, tmp_path, disk.Settings("", "train", 96, "default", None, 0), every=True)
    counts = {plan.out.name: plan.episodes for plan in plans}
    assert counts == dict(tool=100, book=150, laundry=60, cable=30, medicine=60)  # noqa: C408
    assert command.go_on(plans) == f"tracemem collect --all --out {tmp_path}"


def test_lerobot_trains_its_own_act_on_it(three, tmp_path):
    words = [sys.executable, "-m", "lerobot.scripts.lerobot_train", "--policy.type=act", "--policy.device=cpu"]
    words += ["--policy.push_to_hub=false", "--policy.pretrained_backbone_weights=null", "--policy.chunk_size=4"]
    words += ["--policy.n_action_steps=4", "--policy.dim_model=16", "--policy.n_heads=2", "--policy.dim_feedforward=16"]
    words += ["--policy.latent_dim=4", "--policy.n_encoder_layers=1", "--policy.n_vae_encoder_layers=1"]
    words += ["--dataset.repo_id=trace_bench/cable", f"--dataset.root={three}", f"--output_dir={tmp_path / 'act'}"]
    words += ["--steps=2", "--batch_size=2", "--num_workers=0", "--wandb.enable=false", "--log_freq=1"]
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr[-3000:]
    assert list((tmp_path / "act").glob("checkpoints/*/pretrained_model/model.safetensors"))
