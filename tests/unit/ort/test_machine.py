"""Description of the machine: the catalogue of Windows ML, from a recorded listing."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from winml.modelkit.ort.machine import look_at_machine

# Names and values as the package windowsml 2.5.96 returns them; versions as Microsoft documents them.
_PACKAGE = """
from enum import IntEnum
from types import SimpleNamespace


class EpReadyState(IntEnum):
    Ready = 0
    NotReady = 1
    NotPresent = 2


PACKAGE = "MicrosoftCorporationII.WinML.Qualcomm.QNN.EP.1.8_1.8.13.0_arm64__8wekyb3d8bbwe"
FOLDER = "C:\\\\Program Files\\\\WindowsApps\\\\" + PACKAGE
LISTING = [
    ("QNNExecutionProvider", "1.8.13.0", 0, FOLDER + r"\\ExecutionProvider\\onnxruntime_providers_qnn.dll"),
    ("VitisAIExecutionProvider", "1.8.26.0", 1, ""),
    ("OpenVINOExecutionProvider", "", 2, ""),
]


class EpCatalog:
    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def find_all_providers(self):
        keys = ("name", "version", "ready_state", "library_path")
        rows = ((name, version, EpReadyState(state), path) for name, version, state, path in LISTING)
        return [SimpleNamespace(**dict(zip(keys, row))) for row in rows]
"""


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a package ``windowsml``, on a machine that reports Windows."""
    (tmp_path / "windowsml").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "windowsml", raising=False)
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    return tmp_path / "windowsml" / "__init__.py"


def test_catalogue_of_windows_ml_names_the_options_of_its_installed_providers(windows: Path) -> None:
    """A provider that is not installed has no library to name."""
    windows.write_text(_PACKAGE, encoding="utf-8")
    ready, unready, absent = (note for note in look_at_machine().notes if "Windows ML" in note)
    assert (
        "QNNExecutionProvider 1.8.13.0 (Ready): --ep QNNExecutionProvider --ep-library QNNExecutionProvider=C:" in ready
    )
    assert ready.endswith("onnxruntime_providers_qnn.dll")
    assert "VitisAIExecutionProvider 1.8.26.0 (NotReady): its ensure_ready()" in unready
    assert "OpenVINOExecutionProvider (NotPresent): its ensure_ready()" in absent


@pytest.mark.parametrize(
    "problem", ["ImportError('winml is only supported on Windows')", "FileNotFoundError('no DLL')"]
)
def test_catalogue_that_cannot_be_loaded_is_left_out(problem: str, windows: Path) -> None:
    """The package loads its library when it is imported."""
    windows.write_text(f"raise {problem}", encoding="utf-8")
    assert [] == [note for note in look_at_machine().notes if "Windows ML" in note]
