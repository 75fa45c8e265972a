"""Keeps libraries from writing to the terminal while a model is loaded.

What transformers has to say comes back as errors and notes of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from winml.modelkit.runtime.shared_settings import shared_by_threads

__all__ = ["quiet_libraries"]


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
