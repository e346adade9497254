"""LeRobot finds this package by its distribution name; what it offers is a short list, explained."""

import doctest
import inspect
import sys

import pytest

import lerobot_policy_trace
from trace_errors import UsageError


def test_lerobot_imports_the_plugin():
    from lerobot.utils.import_utils import register_third_party_plugins

    sys.modules.pop("lerobot_policy_trace", None)
    register_third_party_plugins()
    assert "lerobot_policy_trace" in sys.modules


def test_there_are_eight_public_names():
    assert len(lerobot_policy_trace.__all__) == 8
    with pytest.raises(AttributeError, match="no attribute 'TracePolicy'"):
        lerobot_policy_trace.TracePolicy  # noqa: B018


@pytest.mark.parametrize("name", lerobot_policy_trace.__all__)
def test_every_public_name_has_a_full_docstring_whose_example_runs(name):
    """What needs a trained policy is not run here; examples/ and docs/robot.md are."""
    thing = getattr(lerobot_policy_trace, name)
    assert "Args:" in inspect.getdoc(thing)
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    assert 1 <= len(test.examples) <= 7
    if inspect.isfunction(thing):
        assert all(f"{part}:" in inspect.getdoc(thing) for part in ("Returns", "Raises"))
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_pipelines_without_a_normaliser_are_refused():
    from lerobot.processor import PolicyProcessorPipeline

    with pytest.raises(UsageError, match="pipelines: got a preprocessor of no steps, expected one with a Normalizer"):
        lerobot_policy_trace.with_raw_state((PolicyProcessorPipeline(steps=[]), None))
