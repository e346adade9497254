"""Progress: a bar on a terminal, few plain lines elsewhere, nothing on a quiet console."""

from io import StringIO

import pytest
from rich.console import Console

from trace_lab import progress as module
from trace_lab.progress import clock, progress


@pytest.fixture
def seconds(monkeypatch):
    """A clock that the test turns."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_is_a_line_every_ten_seconds(seconds):
    out = StringIO()
    with progress("training", 1000, done=100, console=Console(file=out)) as bar:
        for update in range(101, 201):
            seconds[0] += 0.31
            bar.update(update, f"loss {update / 1000}" if update % 20 == 0 else "")
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "training: 133 of 1,000, loss 0.12, 0:04:29 left"
    assert lines[2].startswith("training: 199 of 1,000, loss 0.18, ")


def test_short_work_says_nothing_and_quiet_consoles_never_do(seconds):
    for quiet, passed in ((False, 0.1), (True, 100.0)):
        out = StringIO()
        with progress("decoding", 3, console=Console(file=out, quiet=quiet)) as bar:
            for _ in range(3):
                seconds[0] += passed
                bar.advance()
        assert out.getvalue() == ""
        assert bar.done == 3


def test_on_a_terminal_there_is_a_bar():
    out = StringIO()
    with progress("training", 5, "beginning", console=Console(file=out, force_terminal=True), keep=True) as bar:
        bar.update(5, "loss 0.5")
    assert "training" in out.getvalue()
    assert "5/5" in out.getvalue()
    assert "loss 0.5" in out.getvalue()


def test_time_is_written_as_on_a_clock():
    assert [clock(x) for x in (0, 61, 3723.4)] == ["0:00:00", "0:01:01", "1:02:03"]
