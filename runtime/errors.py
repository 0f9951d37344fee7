"""Every exception a user can meet.

::

    AutotuneError
    ├── ModelError                a model cannot be loaded or is not supported
    │   └── UnsupportedModelError   names the architecture and what failed
    ├── RequestError              one request did not end well
    │   ├── RejectedError           not accepted: queue full, engine closed, cannot meet its SLO
    │   ├── RequestTimeoutError     its timeout passed
    │   ├── RequestCancelledError   cancelled by the client
    │   └── StepFailedError         the model raised, or returned NaN, while it ran
    ├── EngineClosedError         a call on an engine that has been closed
    ├── DeviceError               the device is lost to this process; the engine that used it has closed
    ├── LeaseError                a second controller asked for a tunable already held
    ├── MissingTritonError        the GPU kernels were asked for where Triton is not installed, or does not start
    └── InputError(ValueError)    a file or an option that cannot be used; the CLI prints it and exits with 2

Wrong values (knobs, SLO strings) raise plain ``ValueError`` at the call that brought them, prompts too long
:class:`ContextLengthError`, which is one.
"""

from __future__ import annotations


class AutotuneError(Exception):
    """Base of everything this project raises on purpose."""


class ModelError(AutotuneError):
    """A model directory, hub id or preset cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The model loads, but this engine would compute it wrongly or not at all."""


class RequestError(AutotuneError):
    """One request did not end well; others are not touched."""


class RejectedError(RequestError):
    """The request was not accepted.

    ``message`` is for people; ``reason`` a short name: ``queue_full``, ``closed``, ``slo`` (its first token would come too
    late), ``queue_timeout``; ``retry_after_s`` a hint, seconds from now, or None.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class RequestTimeoutError(RequestError):
    """The request's own timeout passed before it finished."""


class RequestCancelledError(RequestError):
    """The client cancelled the request, or the engine was closed without draining."""


class StepFailedError(RequestError):
    """The step that computed this request failed; ``__cause__`` holds what the model raised."""


class EngineClosedError(AutotuneError):
    """The engine has been closed."""


class DeviceError(AutotuneError):
    """The device cannot be used any more by this process (a CUDA error that stays): the engine closes."""


class LeaseError(AutotuneError):
    """Someone else controls this tunable."""


class MissingTritonError(AutotuneError):
    """The GPU kernels need Triton, which is not installed here, or does not start: it needs a C compiler and Python's headers."""


class InputError(AutotuneError, ValueError):
    """What a user typed or a file they gave cannot be used. One line: the field, the value, what is allowed."""


class ContextLengthError(ValueError):
    """A prompt and its output are longer than the model's context, or than the KV pool."""


def shortened(value: object, most: int = 40) -> str:
    """``value`` as an error quotes it: on one line, of ``most`` characters at most."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
