"""Temporary settings and attributes: restored after the block, and after the last thread that shares them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from huggingface_hub import constants
from torch import nn
from transformers.integrations import hub_kernels
from transformers.utils import logging as messages

from winml.modelkit.ort.foreign_libraries import local_files_only, local_libraries, quiet_libraries
from winml.modelkit.ort.shared_settings import attribute_replaced


def _settings() -> tuple[Any, ...]:
    return (
        constants.HF_HUB_OFFLINE,
        hub_kernels.get_kernel,
        messages.get_verbosity(),
        messages.is_progress_bar_enabled(),
    )


@pytest.mark.parametrize("changed", [local_files_only, quiet_libraries, local_libraries])
def test_overlapping_threads_restore_the_settings(
    changed: Callable[[], AbstractContextManager[None]],
) -> None:
    """The first thread leaves first, while the second still needs the change."""
    before = _settings()
    is_second_in, is_first_out = threading.Event(), threading.Event()

    def second() -> tuple[Any, ...]:
        with changed():
            is_second_in.set()
            assert is_first_out.wait(60)
            return _settings()

    with ThreadPoolExecutor(1) as threads:
        with changed():
            inside = _settings()
            other = threads.submit(second)
            assert is_second_in.wait(60)
        between = _settings()
        is_first_out.set()
        assert inside == between == other.result() != before
    assert before == _settings()


def test_failure_inside_the_block_restores_the_settings() -> None:
    """An error passes, also through a nested block, and the next block changes the settings anew."""
    before = _settings()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), local_libraries(), local_libraries():
            1 / (before == _settings())
        assert before == _settings()


def test_inherited_attribute_is_inherited_again_after_an_error() -> None:
    """The module has no forward of its own afterwards."""
    module = nn.Linear(1, 1)
    with pytest.raises(ZeroDivisionError), attribute_replaced(module, "forward", lambda: 1 / 0):
        module.forward()
    assert "forward" not in vars(module)


def test_own_attribute_is_restored() -> None:
    """An attribute of the object itself is replaced inside the block and restored after it."""
    module = nn.Linear(1, 1)
    own = lambda: "own"  # noqa: E731
    module.forward = own
    with attribute_replaced(module, "forward", lambda: "replaced"):
        assert "replaced" == module.forward()
    assert vars(module)["forward"] is own
