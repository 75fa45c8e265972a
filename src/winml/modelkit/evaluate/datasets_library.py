"""Keeps the datasets library to this disk and from writing to the terminal, and says how it is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.media import INSTALL_HINT
from winml.modelkit.runtime.shared_settings import shared_by_threads

__all__ = ["connection_errors", "import_datasets", "local_data_only", "quiet_datasets"]


def import_datasets() -> None:
    """Make sure that datasets can be imported.

    Raises:
        UsageError: it is not installed, or not whole.
    """
    try:
        import datasets  # noqa: F401  # whether it can be
    except ImportError as error:
        raise UsageError(f"data sets need the package datasets: {error}", hint=INSTALL_HINT) from error


@shared_by_threads
def local_data_only() -> Iterator[None]:
    """Keep datasets off the network: it would count every reading at its makers', of local files as well.

    What it tries all the same raises ConnectionError, as without a network.
    """
    from datasets import config
    from huggingface_hub import constants

    found = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = found


@shared_by_threads
def quiet_datasets() -> Iterator[None]:
    """Keep datasets and huggingface_hub from writing to stderr; what they say comes back as errors of ours."""
    import datasets
    from datasets.utils import logging as messages
    from huggingface_hub.utils import logging as hub_messages

    level, has_bars = messages.get_verbosity(), datasets.is_progress_bar_enabled()
    hub_level = hub_messages.get_verbosity()
    messages.set_verbosity(logging.CRITICAL)
    hub_messages.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        hub_messages.set_verbosity(hub_level)
        if has_bars:
            datasets.enable_progress_bars()


def connection_errors() -> tuple[type[BaseException], ...]:
    """Return OSError and the root error of the HTTP library under the Hub client."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *HfHubHTTPError.__bases__)
