"""The simulated suite of delayed-evidence tasks. MuJoCo and Gymnasium only; knows no torch and no LeRobot."""
