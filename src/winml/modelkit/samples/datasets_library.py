"""Keeps the datasets library to this disk and from writing to the terminal, and asks the Hub before it does."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

from winml.modelkit.errors import HubError, UsageError
from winml.modelkit.ort.shared_settings import shared_by_threads
from winml.modelkit.samples.media import install_hint


def refuse_missing_datasets(words: str) -> None:
    """Refuse a request that needs datasets where it is not installed; does not import it.

    Args:
        words: How messages begin.

    Raises:
        UsageError: says how it is installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"{words}: requires the package datasets, which is not installed", hint=install_hint())


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


def hub_folders() -> tuple[Path, ...]:
    """Return the folders in which files of data sets of the Hub lie once they were fetched or unpacked."""
    from datasets import config
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE), Path(config.DOWNLOADED_DATASETS_PATH)


def ask_hub(name: str, words: str) -> str:
    """Ask the Hub for a data set, once: datasets itself asks again and again for half a minute.

    Args:
        name: The data set.
        words: How messages begin.

    Returns:
        Why it cannot be reached, in words; empty where it has the data set.

    Raises:
        HubError: it has no such data set, or does not show it to this account.
    """
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.is_offline_mode():
        return "the Hub is not used in offline mode (HF_HUB_OFFLINE)"
    # The root error of the HTTP library under the Hub client, which has changed more than once.
    connection: tuple[type[BaseException], ...] = (OSError, *errors.HfHubHTTPError.__bases__)
    try:
        huggingface_hub.HfApi().dataset_info(name)
    except errors.GatedRepoError as error:
        raise HubError(
            f"{words}: is gated and this account has no access",
            hint="Request access on its Hub page, then log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise HubError(
            f"{words}: no such file or folder, and no such dataset on the Hub",
            hint="Check the spelling; for a private dataset, log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except connection as error:
        return f"the Hub cannot be reached: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return ""
