"""Suppresses the messages of torch and transformers during an export.

They concern internals of the libraries and missing optional packages, so the user cannot act on them. Failures are
raised as our errors.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_torch", "unprinted_failures"]

_LIBRARIES = ("torch", "transformers", "onnxscript", "onnx_ir")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress warnings and log messages of the exporting libraries for the time of the block."""
    handlers = _log_handlers()
    for handler in handlers:
        handler.addFilter(_is_for_the_user)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_for_the_user)


@contextmanager
def unprinted_failures() -> Iterator[None]:
    """Keep ``torch.export`` from printing its graph when it fails, past its loggers, for the time of the block."""
    # Half a second to import: by those who export with it only.
    from torch.export import _trace as export_trace

    vars(export_trace)["print"] = _print_nothing
    try:
        yield
    finally:
        del vars(export_trace)["print"]


def _print_nothing(*_values: object, **_options: object) -> None:
    return


def _is_for_the_user(log_record: logging.LogRecord) -> bool:
    return log_record.name.partition(".")[0] not in _LIBRARIES


def _log_handlers() -> list[logging.Handler]:
    """Return every handler that log records of these libraries may reach, also from loggers created later."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _LIBRARIES
    ]
    handlers = [handler for logger in (logging.root, *loggers) for handler in logger.handlers]
    return [*handlers, logging.lastResort] if logging.lastResort else handlers
