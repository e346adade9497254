import json

from trace_lab.cli import main


def test_probe_writes_results_and_a_plot(tmp_path, capsys):
    arguments = [
        "--memory",
        "trace",
        "none",
        "--delay",
        "8",
        "--updates",
        "50",
        "--batch",
        "4",
        "--lengths",
        "2",
        "--json",
    ]
    assert main(["probe", *arguments, "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert [r["memory"] for r in printed] == ["trace", "none"]
    assert set(printed[0]["longer"]) == {"far 2x", "slow 2x"}
    assert printed[0]["solved_at"] is None
    assert [u for u, _ in printed[0]["curve"]] == [25, 50]
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_bad_numbers_are_named(capsys):
    assert main(["probe", "--cues", "9"]) == 2
    assert "cues=9 (1 to 3)" in capsys.readouterr().err


def test_set_changes_one_field_and_names_a_bad_one(tmp_path, capsys):
    arguments = [
        "--delay",
        "8",
        "--updates",
        "25",
        "--batch",
        "4",
        "--lengths",
        "2",
        "--json",
        "--set",
        "slots=2",
        "gate=scalar",
        "--out",
    ]
    assert main(["probe", *arguments, str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["set"] == ["slots=2", "gate=scalar"]
    for bad, message in (("slotz=2", "unknown field ['slotz']"), ("slots", "expected FIELD=VALUE"), ("gate=x", "'x'")):
        assert main(["probe", "--set", bad]) == 2
        assert message in capsys.readouterr().err
