"""The errors Forge raises, one class per kind of mistake.

Every message reads `[op or command] expected …, got …`, with the shapes, dtypes and devices that
matter, followed by one hint.
"""


class ForgeError(Exception):
    """Base of every error that Forge raises on purpose."""


class ShapeError(ForgeError, ValueError):
    """Shapes or ranks that do not fit together."""


class DtypeError(ForgeError, TypeError):
    """A dtype that the op does not take."""


class DeviceError(ForgeError, RuntimeError):
    """A device that is absent, unknown, or differs between arguments."""


class DeviceLostError(DeviceError):
    """A device that failed at work it was given; what it held is lost."""


class OutOfMemoryError(DeviceError, MemoryError):
    """A device without room for what was asked."""


class ArgumentError(ForgeError, ValueError):
    """An attribute (a probability, a form, an axis) out of its range."""


class TapeError(ForgeError, RuntimeError):
    """A tape used in a way that would give wrong gradients."""


class GradientError(ForgeError, RuntimeError):
    """A gradient that a rule got wrong, or that does not exist."""


class NonFiniteError(ForgeError, ArithmeticError):
    """A value or gradient became infinite or not a number."""


class FallbackError(ForgeError, RuntimeError):
    """A reference kernel would have served where `strict` forbids it."""


class ConfigError(ForgeError, ValueError):
    """A setting that is unknown, of the wrong type, or out of range."""


class DataError(ForgeError, ValueError):
    """Data that is missing, empty, too short or unreadable."""


class CheckpointError(ForgeError, RuntimeError):
    """A checkpoint that is absent, torn, edited or of another format."""
