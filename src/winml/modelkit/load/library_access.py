"""Restricts transformers to local files and installed code while a model is resolved and loaded, and to what it needs.

``checkpoints/hub.py`` alone talks to the Hub, before; ``checkpoints/config.py`` alone runs code of a checkpoint, where
the user allowed it. Whatever else would be fetched, for whatever entry of a config, fails here.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NoReturn

from winml.modelkit.runtime.shared_settings import shared_by_threads

__all__ = [
    "import_losses",
    "local_files_only",
    "local_libraries",
    "quiet_libraries",
]


# --- Keeps libraries from writing to the terminal while a model is loaded.
#
# What transformers has to say comes back as errors and notes of ours.


@shared_by_threads
def quiet_libraries() -> Iterator[None]:
    """Keep transformers and huggingface_hub from writing to stderr.

    Threads share the change: the last to leave puts back what the first found.
    """
    from huggingface_hub.utils import logging as hub_messages
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as messages

    level, has_bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    hub_level, has_hub_bars = hub_messages.get_verbosity(), not are_progress_bars_disabled()
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()
    hub_messages.set_verbosity(logging.CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if has_bars:
            messages.enable_progress_bar()
        hub_messages.set_verbosity(hub_level)
        if has_hub_bars:
            enable_progress_bars()


@shared_by_threads
def local_files_only() -> Iterator[None]:
    """Keep the libraries off the network and from fetching kernels.

    Threads share the change: the last to leave puts back what the first found.
    What they try all the same raises OSError (the Hub) or ImportError (a kernel), as with a missing file or package.
    """
    from huggingface_hub import constants
    from transformers.integrations import hub_kernels

    # The one function that loads a kernel; its callers look it up when they need it.
    was_offline, get_kernel = constants.HF_HUB_OFFLINE, hub_kernels.get_kernel
    constants.HF_HUB_OFFLINE, hub_kernels.get_kernel = True, _refuse_kernel
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, hub_kernels.get_kernel = was_offline, get_kernel


@contextmanager
def local_libraries() -> Iterator[None]:
    """Keep the libraries to local files, and from writing to the terminal."""
    with local_files_only(), quiet_libraries():
        yield


def _refuse_kernel(kernel_name: str, *_arguments: object, **_keywords: object) -> NoReturn:
    raise ImportError(f"the kernel {kernel_name} would have to be downloaded from the Hub, and winml downloads no code")


# --- Imports what no export needs when it is called.


_ASSIGNMENT = ("scipy.optimize", "linear_sum_assignment")
"""What the losses of object detectors match boxes with: its module and its name."""


def import_losses() -> None:
    """Import the losses of transformers, which every model class does, without ``scipy.optimize``.

    One function of it is called where an object detector is trained; importing it takes 0.3 s of the 3 s that a model
    class takes (measured). The losses get a function that imports it when it is called.
    """
    name, _ = _ASSIGNMENT
    if name in sys.modules or "transformers.loss.loss_utils" in sys.modules:
        return
    standing_in = _StandingIn(name)
    sys.modules[name] = standing_in
    try:
        # A version without this module imports its losses with the model class.
        with suppress(ImportError):
            importlib.import_module("transformers.loss.loss_utils")
    finally:
        if sys.modules.get(name) is standing_in:
            del sys.modules[name]


class _StandingIn(ModuleType):
    """Stands for ``scipy.optimize`` until anything but the assignment is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name == _ASSIGNMENT[1]:
            return _assigned
        if name.startswith("__"):  # asked by the import itself
            raise AttributeError(name)
        sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


def _assigned(*arguments: Any, **named: Any) -> Any:
    """Call scipy's ``linear_sum_assignment``."""
    module, name = _ASSIGNMENT
    return getattr(importlib.import_module(module), name)(*arguments, **named)
