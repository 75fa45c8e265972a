"""What do torch and transformers say while they export, and who should hear it?

They tell of their own internals and of packages that are not there. Nobody can act on that; what matters comes as an
error of ours.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.export import _trace as export_trace

__all__ = ["quiet_torch"]

_LIBRARIES = ("torch", "transformers", "onnxscript", "onnx_ir")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep warnings and log records of the exporting libraries from the user for the time of the block."""
    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(_is_for_the_user)
    # torch prints the graph it has so far when it gives up, past its own loggers.
    vars(export_trace)["print"] = _print_nothing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del vars(export_trace)["print"]
        for handler in handlers:
            handler.removeFilter(_is_for_the_user)


def _print_nothing(*_values: object, **_options: object) -> None:
    return


def _is_for_the_user(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] not in _LIBRARIES


def _handlers() -> list[logging.Handler]:
    """Return every handler a record of these libraries may reach, from loggers yet to be made as well."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _LIBRARIES
    ]
    found = [handler for logger in (logging.root, *loggers) for handler in logger.handlers]
    return [*found, logging.lastResort] if logging.lastResort else found
