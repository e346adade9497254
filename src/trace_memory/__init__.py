"""The method: signatures, keys, slots, adapters, losses and rivals. Torch only; knows no robot and no LeRobot."""
