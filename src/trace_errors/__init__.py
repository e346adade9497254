"""Every error that a user can cause. One root, `TraceError`, and a child for each kind of thing that can be wrong. A message
names the field, what came and what was expected. The command line prints it as one line and exits with `exit_code`.
"""


class TraceError(Exception):
    """Something came that cannot be used; nothing was changed."""

    exit_code = 1


class UsageError(TraceError, ValueError):
    """An option or argument makes no sense."""

    exit_code = 2


class DatasetError(TraceError, ValueError):
    """A dataset, or a folder for one, cannot be used."""


class CheckpointError(TraceError, ValueError):
    """A file of weights, of a policy or of a memory's state does not fit, or may not be loaded."""


class ObservationError(TraceError, ValueError):
    """An input of a memory or policy step was refused; the step was not taken."""


class ControlError(TraceError, RuntimeError):
    """A control step could not be taken; memory and queues are as they were before it."""


class RunError(TraceError):
    """A training, evaluation or comparison cannot begin or go on; what it has stays as it is."""


class SimulationError(TraceError, RuntimeError):
    """A simulator failed: it cannot draw, or a process of it died."""
