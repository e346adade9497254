import json
import re
from pathlib import Path

from trace_lab.cli import main
from trace_lab.params import memories


def test_json_counts_the_papers_maps(capsys):
    assert main(["params", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    paper = counts["forms"]["paper"]
    assert paper["updater"] == 11_905_025
    maps = {name: row["parameters"] for name, row in paper["maps"].items()}
    assert maps == {
        "phi_g": 2_935_296,
        "phi_delta": 2_935_296,
        "phi_rho": 787_456,
        "W_Q": 262_144,
        "W_K": 262_144,
        "phi_w": 1_311_744,
        "phi_m": 1_049_600,
        "phi_beta": 787_457,
        "phi_r": 1_049_600,
        "W_K_read": 262_144,
        "W_V_read": 262_144,
    }
    assert sum(maps.values()) == paper["updater"]
    assert counts["adapters"]["regression"]["[z, g, dg] to summary"] == 786_944
    assert counts["adapters"]["diffusion"]["total"] == 15_991_808
    assert all(row["total"] == sum(v for k, v in row.items() if k != "total") for row in counts["adapters"].values())


def test_table_shows_every_part(capsys):
    assert main(["params", "--width", "64", "--hidden", "64"]) == 0
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("TRACE, paper's form", "phi_beta", "W_V_read", "[z, g, dg] to summary", "retrieval")
    )


def test_the_documented_sizes_are_the_counted_ones():
    """The table of docs/memories.md, row by row, against the modules."""
    text = (Path(__file__).parents[2] / "docs/memories.md").read_text()
    row = r"^\| `([a-z-]+)` \|.*\| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$"
    documented = {
        name: {
            "parameters": int(p.replace(",", "")),
            "state_bytes": int(b.replace(",", "")),
            "mega_mac_per_step": float(m),
        }
        for name, p, b, m in re.findall(row, text, re.MULTILINE)
    }
    assert documented == memories(512, 512)
