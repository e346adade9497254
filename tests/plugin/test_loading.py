"""A checkpoint from anyone is data: what its processor files name is checked before LeRobot makes anything of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors

import lerobot_policy_trace  # noqa: F401  (registers the configurations)
from lerobot_policy_trace.loading import STEPS, check_processors, load_configuration, load_processors
from trace_errors import CheckpointError
from trace_lab.cli import main

FILES = ["policy_preprocessor.json", "policy_postprocessor.json"]


def save(kind: str, folder: Path) -> Path:
    """A checkpoint whose weights are not there yet: a refusal comes before anyone misses them."""
    pictures = {"observation.images.overhead": PolicyFeature(FeatureType.VISUAL, (3, 64, 64))}
    config = PreTrainedConfig.get_choice_class(kind)(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (17,)), **pictures},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (17,))},
        device="cpu",
    )
    statistics = {name: {"mean": torch.zeros(17), "std": torch.ones(17)} for name in ("observation.state", "action")}
    for part in (config, *make_pre_post_processors(config, dataset_stats=statistics)):
        part.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def change(file: Path, how: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    how(content)
    file.write_text(json.dumps(content))


def normaliser(content: dict[str, Any]) -> dict[str, Any]:
    return next(step for step in content["steps"] if step["registry_name"].endswith("normalizer_processor"))


def refused(kind: str, folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        check_processors(kind, folder)
    return str(error.value)


@pytest.mark.parametrize("kind", STEPS)
def test_a_policys_own_processors_are_loaded(kind, tmp_path):
    folder = save(kind, tmp_path)
    before, after = load_processors(load_configuration(folder), folder)
    names = [type(step)._registry_name for step in before.steps], [type(step)._registry_name for step in after.steps]
    assert [sorted(each) for each in names] == [sorted(STEPS[kind][file]) for file in FILES]  # these, and no others


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a class": (
        lambda x: x["steps"].insert(1, {"class": "subprocess.Popen", "config": {"args": ["touch", "marker"]}}),
        "step 1: class: got 'subprocess.Popen', expected no class, but a registry_name of ",
    ),
    "a class beside a name": (
        lambda x: x["steps"][1].update({"class": "subprocess.Popen"}),
        "step 1: class: got 'subprocess.Popen', expected no class",
    ),
    "another step": (
        lambda x: x["steps"].insert(1, {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": "x"}}),
        "step 1: registry_name: got 'tokenizer_processor', expected one of ",
    ),
    "trust": (
        lambda x: x["steps"][0]["config"].update(trust_remote_code=False),
        "steps[0].config.trust_remote_code: found it, expected none",
    ),
    "trust at the top": (lambda x: x.update(trust_remote_code=True), "trust_remote_code: found it, expected none"),
    "a type": (lambda x: normaliser(x)["config"].update(eps="1e-8"), "config.eps: got '1e-8', expected a number"),
    "a truth for a number": (
        lambda x: normaliser(x)["config"].update(eps=True),
        "config.eps: got True, expected a num",
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("command", ["eval", "attach"])
def test_commands_refuse_before_anything_is_made(command, file, bad, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder, (how, message) = save("act", tmp_path / "found"), BAD[bad]
    change(folder / file, how)
    out, options = tmp_path / "out", {"eval": ["--task", "cable"], "attach": []}
    assert main([command, str(folder), "--out", str(out), *options[command]]) == 1
    said = capsys.readouterr().err
    assert f"{folder / file}: " in said
    assert message in said
    assert not out.exists()
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("command", ["eval", "attach"])
def test_commands_refuse_other_policies(command, tmp_path, capsys):
    folder = save("act", tmp_path / "found")
    change(folder / "config.json", lambda x: x.update(type="pi0"))
    options = {"eval": ["--task", "cable"], "attach": []}
    assert main([command, str(folder), "--out", str(tmp_path / "out"), *options[command]]) == 1
    expected = {"eval": "act, diffusion, trace_act, trace_diffusion", "attach": "act, diffusion"}
    said = f"config.json: type: got a policy of type 'pi0', expected one of {expected[command]}\n"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda x: x.update(more=1), ": more: got 1, expected only name, steps"),
        (lambda x: x.pop("steps"), "steps: got None, expected a list"),
        (lambda x: x["steps"].insert(0, "x"), "step 0: got 'x', expected a table"),
        (
            lambda x: x["steps"][0].update(more=1),
            "step 0: more: got 1, expected only registry_name, config, state_file",
        ),
        (lambda x: x["steps"][0].update(config=[]), "step 0: config: got [], expected a table"),
        (lambda x: x["steps"][0]["config"].update(more=1), "step 0: config.more: got 1, expected only "),
        (lambda x: normaliser(x)["config"].pop("features"), "config.features: got none, expected a table"),
        (
            lambda x: normaliser(x)["config"].update(features={"a": {"type": "ACTION", "shape": ["x"]}}),
            "config.features",
        ),
        (lambda x: normaliser(x)["config"].update(norm_map={"ACTION": ["MIN_MAX"]}), "config.norm_map: got {'ACTION'"),
        (lambda x: normaliser(x)["config"].update(normalize_observation_keys="ab"), "expected a list of names"),
        (lambda x: normaliser(x).update(state_file="../x.safetensors"), "state_file: got '../x.safetensors', expected"),
        (lambda x: normaliser(x).update(state_file="config.json"), "state_file: got 'config.json', expected the plain"),
        (lambda x: normaliser(x).update(state_file="no.safetensors"), "state_file: got 'no.safetensors', expected the"),
        (lambda x: normaliser(x).update(state_file=3), "state_file: got 3, expected the plain name of a .safetensors"),
    ],
)
def test_fields_are_named(how, message, file, tmp_path):
    folder = save("act", tmp_path / "found")
    (tmp_path / "x.safetensors").write_bytes(b"")
    change(folder / file, how)
    said = refused("act", folder)
    assert said.startswith(f"{folder / file}: ")
    assert message in said


def test_each_policy_has_its_own_steps(tmp_path):
    folder = save("trace_act", tmp_path)
    said = refused("act", folder)  # a stock policy has no memory that wants the raw state
    assert "policy_preprocessor.json: step 3: registry_name: got 'trace_keep_raw_state', expected one of rename" in said
    said = refused("pi0", folder)
    assert "type: got a policy of type 'pi0', expected one of act, diffusion, trace_act, trace_diffusion" in said


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", None])
def test_files_that_are_no_processors_are_named(text, tmp_path):
    folder = save("act", tmp_path)
    file = folder / FILES[1]
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert str(file) in refused("act", folder)


def test_what_lerobot_cannot_make_of_them_is_named(tmp_path):
    folder = save("act", tmp_path)
    change(folder / FILES[0], lambda x: x["steps"][2]["config"].update(float_dtype="float7"))
    with pytest.raises(CheckpointError, match=r"its processors cannot be loaded\. .*float7"):
        load_processors(load_configuration(folder), folder)
    normal = next(folder.glob("*step_3_normalizer*"))
    change(folder / FILES[0], lambda x: x["steps"][2]["config"].update(float_dtype=None))
    normal.write_bytes(normal.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="its processors cannot be loaded"):
        load_processors(load_configuration(folder), folder)


def test_nothing_else_loads_processors():
    places = (Path(__file__).parents[2] / "src").rglob("*.py")
    texts = {path.name: path.read_text() for path in places}
    assert {name for name, text in texts.items() if "pretrained_path" in text} == {"loading.py"}
    assert {name for name, text in texts.items() if "PreTrainedConfig.from_pretrained" in text} == {"loading.py"}
