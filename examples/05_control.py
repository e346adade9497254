"""A control loop: any LeRobot robot, a policy with a memory, its pre- and postprocessor. Here the robot is the suite's
simulated one; for an SO-101 only the line that makes it differs.
"""

import sys
import time

import torch
from lerobot.policies.utils import build_inference_frame, make_robot_action
from lerobot.utils.feature_utils import hw_to_dataset_features

from lerobot_policy_trace import load_policy
from lerobot_policy_trace.robot import TraceBenchRobot, TraceBenchRobotConfig
from trace_errors import ObservationError


def main(checkpoint: str = "checkpoints/signal/trace", steps: int = 150, fps: float = 10.0) -> float:
    """Plays one episode; returns the share of the task's stages that were done."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy, before, after = load_policy(checkpoint, device)
    policy.compile_for_control()  # once: every step is fast from now on

    robot = TraceBenchRobot(TraceBenchRobotConfig(task="Signal", size=64))
    robot.connect()
    features = hw_to_dataset_features(robot.observation_features, "observation")
    features |= hw_to_dataset_features(robot.action_features, "action")
    policy.reset()  # an episode begins: a fresh memory, no queued actions
    for _ in range(steps):
        began = time.perf_counter()
        observation = build_inference_frame(robot.get_observation(), torch.device(device), features)
        try:
            action = after(policy.select_action(before(observation)))  # the memory steps on every call
        except ObservationError as error:  # a camera dropped out, say: nothing has changed, go on with the next one
            print(error)
            continue
        robot.send_action(make_robot_action(action, features))
        if robot.over:
            break
        time.sleep(max(0.0, 1 / fps - (time.perf_counter() - began)))
    progress = robot.env.record.progress
    print(f"{robot.env.record.outcome}, progress {progress:.0%}")
    robot.disconnect()
    return progress


if __name__ == "__main__":
    main(*sys.argv[1:2])
