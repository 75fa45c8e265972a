"""What can go wrong?

Every error a caller may meet, in one tree. The exit code of the command is on the class (FORMATS: 0 done, 1 failed,
2 wrong usage, 3 the answer is "no")::

    WinMLError                      1
    ├── UsageError                  2   the request is wrong: change the command or the call
    │   ├── ConfigError             2   a JSON text or an option value is malformed or unknown
    │   ├── TaskError               2   the task is unknown, ambiguous, or not offered by the architecture
    │   ├── ModelPathError          2   nothing usable stands at the path that names the model
    │   └── OutputExistsError       2   the output is there already
    ├── InputError                  1   the request is fine, the material is not: mend the files
    │   ├── HubError                1   a Hub id could not be resolved or fetched
    │   ├── CheckpointError         1   config or weights are missing, truncated, of the wrong shape, or unsafe
    │   └── RemoteCodeError         1   the checkpoint wants to run its own code and was not allowed to
    ├── StageError                  1   a stage could not do its work on this model
    │   ├── ExportError             1
    │   ├── NormalizeError          1
    │   ├── OptimizeError           1
    │   ├── MeasureError            1
    │   └── WriteError              1   the output could not be written
    ├── VerificationError           3   two models that should answer alike do not
    └── InternalError               1   our mistake: asks for a report

Messages are one to three lines: what failed, with which value, what was expected, what to do next. This module knows
neither click nor any library; ``cli/_errors.py`` turns these types into text on stderr.
"""

from __future__ import annotations

from typing import ClassVar


class WinMLError(Exception):
    """Root of the tree: catch it to catch all of them.

    Attributes:
        message: What failed, with which value, and what was expected.
        hint: What to do next, or an empty string.
        step: Which step of the flow failed (``step 4 of 8, ONNX export``), or an empty string.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.step = ""

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(WinMLError):
    """The request is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A JSON text or an option value is malformed, has an unknown key, or a value of the wrong kind."""


class TaskError(UsageError):
    """The task is unknown, ambiguous, or not offered by the architecture.

    Attributes:
        candidates: Tasks that would be accepted.
    """

    def __init__(self, message: str, *, hint: str = "", candidates: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.candidates = candidates


class ModelPathError(UsageError):
    """Nothing usable stands at the path that names the model."""


class OutputExistsError(UsageError):
    """The output is there already and overwriting was not asked for."""


class InputError(WinMLError):
    """The request is fine, the material it names is not."""


class HubError(InputError):
    """A Hub id could not be resolved or fetched."""


class CheckpointError(InputError):
    """Config or weights are missing, truncated, of the wrong shape, or unsafe to read."""


class RemoteCodeError(InputError):
    """The checkpoint wants to run code of its own and was not allowed to."""


class StageError(WinMLError):
    """A stage could not do its work on this model."""


class ExportError(StageError):
    """A torch module could not be turned into a graph.

    Attributes:
        operator: The operator the exporter lacks, such as ``aten::diff``, where that is the reason.
        module: Dotted path of the module in whose forward it failed, where known.
    """

    def __init__(self, message: str, *, hint: str = "", operator: str | None = None, module: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.operator = operator
        self.module = module


class NormalizeError(StageError):
    """A normalization pass broke its promise or could not run."""


class OptimizeError(StageError):
    """A graph could not be made cheaper: an engine failed, or a pass broke its promise."""


class MeasureError(StageError):
    """Nothing could be measured: the graph does not run, or the execution provider records no profile."""


class WriteError(StageError):
    """An output file could not be written; earlier files are as they were."""


class VerificationError(WinMLError):
    """Two models that should answer alike do not, or the reference holds no signal to compare with.

    Attributes:
        is_graph_wrong: Whether the graph is at fault as far as can be told, and neither the reference nor the inputs.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", is_graph_wrong: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_graph_wrong = is_graph_wrong


class InternalError(WinMLError):
    """Our mistake: please report it."""


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's text, or its type where it has none; for use inside our messages."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
