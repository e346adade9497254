"""LeRobot finds this package by its distribution name."""

import sys


def test_lerobot_imports_the_plugin():
    from lerobot.utils.import_utils import register_third_party_plugins

    sys.modules.pop("lerobot_policy_trace", None)
    register_third_party_plugins()
    assert "lerobot_policy_trace" in sys.modules
