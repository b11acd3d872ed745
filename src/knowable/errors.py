"""Every exception and warning of the library.

Each exception is a :class:`KnowableError` and also the built-in a Python programmer would expect, so both
``except knowable.KnowableError`` and ``except ValueError`` work. Messages name the argument, what was expected, what
came, and what to do.
"""


class KnowableError(Exception):
    """The root of all exceptions raised on purpose by knowable."""


class InvalidArgument(KnowableError, ValueError):
    """An argument has a value outside what is allowed."""


class InvalidType(KnowableError, TypeError):
    """An argument has the wrong type."""


class InvalidData(KnowableError, ValueError):
    """The data cannot be used: wrong shape, missing or infinite values, labels out of range. The message says where."""


class Unsupported(KnowableError, NotImplementedError):
    """What was asked for does not exist for this combination; the message names what does."""


class Diverged(KnowableError, RuntimeError):
    """A fit left the finite numbers and could not be brought back."""


class TooFewSteps(KnowableError, RuntimeError):
    """A time limit ended a fit when it had hardly begun: there is no answer yet."""


class ProcessLost(KnowableError, ConnectionError):
    """Another process of a distributed fit has gone, or does not answer in time."""


class DamagedArtifact(KnowableError, OSError):
    """A saved folder is missing files, truncated, altered, or written by a newer format."""


class NotSigned(DamagedArtifact):
    """An artifact has no signature, one of another key, or was altered after it was signed."""


class CannotSave(KnowableError, OSError):
    """The disk is full, or the place cannot be written. What was saved there before is unchanged."""


class MissingExtra(KnowableError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class CannotConnect(KnowableError, ConnectionError):
    """The machines that an engine names cannot be reached, or have too little for a piece of work."""


class WorkerLost(KnowableError, RuntimeError):
    """Workers died, or ran out of memory, again and again on the same piece of work."""


class KnowableWarning(UserWarning):
    """The root of all warnings raised by knowable."""


class ConvergenceWarning(KnowableWarning):
    """A fit ended before its objective had settled, had to be restarted with a smaller step, or its noise collapsed."""


class Interrupted(KnowableWarning):
    """A fit was stopped from the keyboard; what it had learned so far was returned."""


class WorseThanNetwork(KnowableWarning):
    """A posterior predicts worse than the trained weights it was made from."""


class CalibrationWarning(KnowableWarning):
    """Held-out data are too few to recalibrate with, or did not become more probable by it."""


class ModelWarning(KnowableWarning):
    """Network, likelihood and data go together in shape but probably not in meaning, or a parameter has no effect."""


class NeedsClasses(KnowableWarning):
    """What was saved has a prior or likelihood of the user's own, whose class is needed to load it."""


class UnseenCategory(KnowableWarning):
    """Rows have a category that was not in training; their predictions average over the known ones."""
