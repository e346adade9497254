"""The frame store gives what LeRobot's loader gives, from wherever it keeps it, and refuses what it cannot use."""

import copy
import errno
import json
import shutil

import pyarrow.compute
import pyarrow.parquet
import pytest
import torch
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from lerobot_policy_trace.paths import Paths
from trace_errors import DatasetError, UsageError
from trace_lab import frames
from trace_lab.frames import open_dataset, open_frames
from trace_lab.policy import configuration, pipelines
from trace_lab.recipe import recipe
from trace_lab.source import changes, describe, fingerprint

CAMERA = "observation.images.left_wrist"
SMALL = {
    "act": {"policy.chunk_size": 12, "policy.n_action_steps": 4},
    "diffusion": {"policy.horizon": 16, "policy.n_action_steps": 4, "policy.down_dims": [32, 64]},
}


@pytest.fixture(scope="module")
def store(dataset):
    return open_frames(open_dataset(dataset), "cpu")


@pytest.mark.parametrize("memory", ["none", "trace"])
@pytest.mark.parametrize("policy", ["act", "diffusion"])
def test_samples_are_those_of_lerobots_loader(dataset, store, policy, memory):
    made = recipe("tiny", policy, memory, SMALL[policy] | {"memory.history_frames": 6, "memory.history_stride": 7})
    config = configuration(made, store.meta, "cpu")
    theirs = LeRobotDataset("local/cable", root=dataset, delta_timestamps=resolve_delta_timestamps(config, store.meta))
    rows = torch.tensor([0, 3, 100, int(store.paths.ends[0]) - 1, int(store.paths.ends[0]), len(theirs) - 1])
    episodes = torch.tensor([0, 0, 0, 0, 1, 1])
    ours = store.sample(rows, episodes, config)
    expected = torch.utils.data.default_collate([theirs[int(row)] for row in rows])
    for name in ours:
        assert torch.equal(ours[name], expected[name]), name
    needed = {"index", "action", "action_is_pad", "observation.state", *config.image_features}
    assert needed <= set(ours)
    before, _ = pipelines(config, store.meta)
    mine, plugin = before(ours), before(expected)
    for name in ("observation.state", "action", *config.image_features):
        assert torch.equal(mine[name], plugin[name])


def test_a_mapped_file_holds_the_same_and_is_made_once(dataset, store, tmp_path, monkeypatch):
    first = open_frames(store.meta, "cpu", place="file", cache=tmp_path / "kept")
    monkeypatch.setattr(frames, "decode_into", lambda *_: pytest.fail("decoded again"))
    again = open_frames(store.meta, "cpu", place="ram", cache=tmp_path / "kept")
    rows = torch.tensor([[5, 6], [200, 300]])
    for camera in store.cameras:
        expected = store.pictures(camera, rows)
        assert expected.shape == (2, 2, 3, 64, 64)
        assert torch.equal(first.pictures(camera, rows), expected)
        assert torch.equal(again.pictures(camera, rows), expected)
    assert store.place == "ram" and first.place == "file"  # noqa: PT018


def test_the_nearest_place_with_room_is_chosen(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * 10**9, 140 * 10**9))
    monkeypatch.setattr(frames.os, "sysconf", lambda name: 10**7 if name == "SC_PHYS_PAGES" else 4096)  # 41 GB
    assert frames.choose_place("auto", 5 * 10**9, gpu) == "gpu"
    assert frames.choose_place("auto", 5 * 10**9, cpu) == "ram"
    assert frames.choose_place("auto", 10**11, gpu) == "file"
    assert frames.choose_place("ram", 10**11, gpu) == "ram"
    with pytest.raises(UsageError, match="got 'gpu', but the training device is cpu"):
        frames.choose_place("gpu", 1, cpu)
    with pytest.raises(UsageError, match="got 'tape', expected one of auto, gpu, ram, file"):
        frames.choose_place("tape", 1, cpu)


def test_a_dataset_that_changed_is_refused(dataset, tmp_path):
    copy = tmp_path / "cable"
    shutil.copytree(dataset, copy)
    before = fingerprint(copy)
    assert before == fingerprint(dataset)
    open_frames(open_dataset(copy), "cpu", cache=tmp_path / "kept")
    (copy / "meta" / "trace_memory").mkdir(exist_ok=True)
    (copy / "meta" / "trace_memory" / "mine").touch()  # what we keep there ourselves is no change
    open_frames(open_dataset(copy), "cpu", cache=tmp_path / "kept")
    table = next((copy / "data").glob("**/*.parquet"))
    content = pyarrow.parquet.read_table(table)
    pyarrow.parquet.write_table(
        content.set_column(0, content.column_names[0], content.columns[0]), table, compression="gzip"
    )
    assert "has other content" in changes(before, fingerprint(copy))
    with pytest.raises(
        DatasetError, match=r"changed since its frames were decoded into .*kept: data/.*parquet has other"
    ):
        open_frames(open_dataset(copy), "cpu", cache=tmp_path / "kept")


def test_changes_name_the_file():
    assert changes({"a": "1"}, {"a": "1"}) == ""
    assert changes({"a": "1", "b": "2"}, {"a": "1"}) == "b is gone"
    assert changes({}, {"a": "1", "b": "2"}) == "a is new, and 1 more differ"


def test_a_damaged_video_is_named(dataset, tmp_path):
    copy = tmp_path / "cable"
    shutil.copytree(dataset, copy)
    video = next((copy / "videos" / CAMERA).glob("**/*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 3])
    with pytest.raises(DatasetError, match=r"left_wrist.*mp4: cannot be decoded for .*left_wrist, episode \d"):
        open_frames(open_dataset(copy), "cpu")


def test_a_missing_video_is_named(dataset, tmp_path):
    copy = tmp_path / "cable"
    shutil.copytree(dataset, copy)
    next((copy / "videos" / CAMERA).glob("**/*.mp4")).unlink()
    with pytest.raises(DatasetError, match=r"left_wrist.*mp4: cannot be decoded"):
        open_frames(open_dataset(copy), "cpu")


def test_what_is_no_dataset_or_an_empty_one_is_refused(dataset, tmp_path):
    with pytest.raises(DatasetError, match=r"no meta/info.json there"):
        open_dataset(tmp_path)
    shutil.copytree(dataset, tmp_path / "cable")
    info = tmp_path / "cable" / "meta" / "info.json"
    content = json.loads(info.read_text())
    info.write_text(json.dumps(content | {"total_episodes": 0, "total_frames": 0}))
    with pytest.raises(DatasetError, match="the dataset is empty"):
        open_dataset(tmp_path / "cable")
    del content["features"]["action"]
    info.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=r"has no feature 'action'; its features are observation\.state"):
        open_dataset(tmp_path / "cable")
    for text in ('{"half', "[]", "{}"):
        info.write_text(text)
        with pytest.raises(DatasetError, match=r"info\.json: cannot be read .*, expected the description of a LeRobot"):
            describe(tmp_path / "cable")
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=r"no meta/info.json there"):
        describe(tmp_path / "file")


def test_a_missing_camera_is_named(store):
    with pytest.raises(DatasetError, match=r"has no camera observation\.images\.rear; its cameras are .*overhead"):
        open_frames(store.meta, "cpu", cameras=["observation.images.rear"])


def test_a_camera_of_single_images_is_named(store):
    meta = copy.copy(store.meta)
    meta.info = copy.deepcopy(store.meta.info)
    meta.info.features[CAMERA]["dtype"] = "image"
    with pytest.raises(DatasetError, match=r"left_wrist stored as single images, expected video"):
        open_frames(meta, "cpu")


def test_part_of_a_dataset_is_refused(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "cable")
    (table,) = (tmp_path / "cable" / "data").glob("**/*.parquet")
    content = pyarrow.parquet.read_table(table)
    keep = pyarrow.compute.equal(content["episode_index"], 1)
    pyarrow.parquet.write_table(content.filter(keep), table)
    with pytest.raises(DatasetError, match=r"its tables hold 1 episodes of \d+ frames, its description says 2 of"):
        open_frames(open_dataset(tmp_path / "cable"), "cpu")


def test_two_threads_may_read_one_file(store):
    one = open_frames(store.meta, "cpu", cameras=[CAMERA])
    assert torch.equal(one.cameras[CAMERA], store.cameras[CAMERA])


def test_an_episode_of_one_frame_is_named(store, monkeypatch):
    real = frames.Paths.of

    def with_stub(meta):
        paths = real(meta)
        last = paths.ends[-1:] - 1
        return Paths(paths.states, torch.cat([paths.starts, last]), torch.cat([paths.ends[:-1], last, last + 1]))

    monkeypatch.setattr(frames.Paths, "of", with_stub)
    with pytest.raises(DatasetError, match=r"episode 2 has a single frame.*delete_episodes"):
        open_frames(store.meta, "cpu")


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_full_disk_leaves_nothing_behind(store, tmp_path, monkeypatch, when):
    if when == "before":
        monkeypatch.setattr(frames.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
        expected = pytest.raises(DatasetError, match=r"not enough space at .*MB needed for decoded frames")
    else:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(frames.os, "posix_fallocate", full)
        expected = pytest.raises(OSError, match="No space left")
    with expected:
        open_frames(store.meta, "cpu", place="file", cache=tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["lock"]
