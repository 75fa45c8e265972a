"""Access of libraries such as transformers to foreign folders: checked files, no network, no foreign code.

Only ``models/checkpoints/hub.py`` accesses the Hub, before the libraries read a folder; only
``models/checkpoints/config.py`` runs code of a checkpoint, with the user's permission.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from winml.modelkit.errors import InputError
from winml.modelkit.onnx.files.foreign_files import check_library_files, foreign_parser
from winml.modelkit.ort.shared_settings import shared_by_threads


def has_transformers() -> bool:
    """Return True if transformers is installed; without a torch for the platform, winml is installed without both."""
    return importlib.util.find_spec("transformers") is not None


_KERNELS = "transformers.integrations.hub_kernels"


@shared_by_threads
def local_files_only() -> Iterator[None]:
    """Disable network access, download of kernels, and execution of foreign code in the libraries.

    Threads share the change: the last to leave restores the original settings. An attempt raises OSError (the Hub),
    ImportError (a kernel) or ValueError (code of a checkpoint), as with a missing file or package.
    """
    if not has_transformers():
        yield
        return
    from winml.modelkit.ort.library_imports import import_transformers

    import_transformers()
    from huggingface_hub import constants
    from transformers import dynamic_module_utils

    # Kernels are for PyTorch, and the module is imported only with it.
    has_torch = importlib.util.find_spec("torch") is not None
    hub_kernels: Any = importlib.import_module(_KERNELS) if has_torch else SimpleNamespace(get_kernel=None)
    # The only function that loads a kernel; its callers look it up on use.
    was_offline, get_kernel = constants.HF_HUB_OFFLINE, hub_kernels.get_kernel
    # Seconds that transformers waits for an answer to its question whether code may run. At 0 it refuses without a
    # question, and code runs only if the caller passes trust_remote_code=True.
    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    constants.HF_HUB_OFFLINE, hub_kernels.get_kernel = True, _refuse_kernel
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, hub_kernels.get_kernel = was_offline, get_kernel
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


def _refuse_kernel(kernel_name: str, *_arguments: object, **_keywords: object) -> NoReturn:
    """Raise ImportError in place of a download."""
    raise ImportError(f"the kernel {kernel_name} would have to be downloaded from the Hub, and winml downloads no code")


@shared_by_threads
def quiet_libraries() -> Iterator[None]:
    """Keep transformers and huggingface_hub from writing to stderr.

    Threads share the change: the last to leave restores the original settings.
    """
    from winml.modelkit.ort.library_imports import import_transformers

    import_transformers()
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


@contextmanager
def local_libraries() -> Iterator[None]:
    """Restrict the libraries to local files, and keep them from writing to the terminal."""
    with local_files_only(), quiet_libraries():
        yield


@contextmanager
def library_folder(folder: Path, words: str, *, error: type[InputError] = InputError, hint: str = "") -> Iterator[None]:
    """Check the files of a folder, and allow libraries to read them inside the block, without network or foreign code.

    Args:
        folder: The folder that the library reads.
        words: Subject and verb of the message if the library fails, such as ``FOLDER: its tokenizer cannot be read``.
        error: Type of the error to raise.
        hint: What the user can do if the library fails.

    Raises:
        InputError: a file is a link to another folder or no regular file, a config has an absurd size, or the library
            raises any error.
    """
    from winml.modelkit.onnx.files.foreign_numbers import check_config_files

    check_library_files(folder, error=error)
    check_config_files(folder, error=error)
    with local_files_only(), foreign_parser(words, error=error, hint=hint):
        yield
