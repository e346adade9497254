"""The LeRobot plug-in, found by LeRobot through this distribution's name."""
