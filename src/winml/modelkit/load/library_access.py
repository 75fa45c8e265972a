"""Keeps transformers to the files on this disk and to installed code while a model is resolved and loaded.

``checkpoints/hub.py`` alone talks to the Hub, before; ``checkpoints/config.py`` alone runs code of a checkpoint, where
the user allowed it. Whatever else would be fetched, for whatever entry of a config, fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from winml.modelkit.load.library_messages import quiet_libraries
from winml.modelkit.runtime.shared_settings import shared_by_threads

__all__ = ["local_files_only", "local_libraries"]


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


def _refuse_kernel(kernel_name: str, *_arguments: Any, **_keywords: Any) -> NoReturn:
    raise ImportError(f"the kernel {kernel_name} is on the Hub, and no code is fetched from there")
