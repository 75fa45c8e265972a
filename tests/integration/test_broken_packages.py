"""Error messages about installed packages that cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from checkpoints import save_checkpoint
from e2e.warm_processes import can_run_warm, run_warm
from e2e.workplace import TIMEOUT_S

BROKEN = {
    "torchaudio": 'raise OSError("libtorchaudio.so: undefined symbol: _ZN3c10")',
    "einops": 'raise ImportError("cannot import name rearrange")',
}
SCRIPT = "def build():\n    import {name}\n"
REMOTE = "import einops\nfrom transformers import PretrainedConfig\nclass C(PretrainedConfig):\n    pass\n"
REMOTE_CONFIG = '{"model_type": "own", "auto_map": {"AutoConfig": "code.C"}}'


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of installed but broken packages."""
    folder = tmp_path / "packages"
    for name, code in BROKEN.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code, encoding="utf-8")
        (folder / f"{name}-1.0.dist-info").mkdir()
        (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n", encoding="utf-8")
    return folder


_WITH_PACKAGES = "import sys; sys.path.insert(0, sys.argv.pop(1)); from winml.modelkit.cli.main import main; main()"
"""Runs the command; its first argument is the folder of the packages."""


def _inspect(packages: Path, *arguments: str | Path, is_warm: bool = True) -> str:
    """Run inspect; not warm: in a process that has not imported transformers yet."""
    command = [str(packages), "inspect", *map(str, arguments)]
    if is_warm and can_run_warm():
        code, _, err = run_warm(command, packages, os.environ, "", TIMEOUT_S, _WITH_PACKAGES)
    else:
        done = subprocess.run(
            [sys.executable, "-c", _WITH_PACKAGES, *command],
            cwd=packages, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
        code, err = done.returncode, done.stderr
    assert 1 == code
    assert "internal error" not in err
    return err


def test_package_that_transformers_imports_is_named(packages: Path, tmp_path: Path) -> None:
    """The package is named although the model does not need it."""
    folder = save_checkpoint("bert", tmp_path / "bert")
    error = _inspect(packages, "-m", folder, is_warm=False)
    assert "torchaudio" in error


@pytest.mark.parametrize("name", BROKEN)
def test_package_that_a_script_imports_is_named_with_the_line(packages: Path, tmp_path: Path, name: str) -> None:
    """The message names the user's line and the package."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(name=name), encoding="utf-8")
    assert f"script.py:2: {name} cannot be imported: " in _inspect(packages, "-m", f"{script}:build")


def test_package_that_code_of_a_checkpoint_imports_is_named(packages: Path, tmp_path: Path) -> None:
    """The package is named once the code of the checkpoint may run."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(REMOTE_CONFIG, encoding="utf-8")
    (folder / "code.py").write_text(REMOTE, encoding="utf-8")
    error = _inspect(packages, "-m", folder / "config.json", "--trust-remote-code")
    assert "einops:" in error


@pytest.mark.parametrize("content", [b"[other.group]\nname = \xff:x\n", b"[other.group]\nname\n"])
def test_package_with_unreadable_metadata_is_named(packages: Path, tmp_path: Path, content: bytes) -> None:
    """Libraries read the entry points of all packages, and Python's error does not name the unreadable one."""
    (packages / "einops-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    error = _inspect(packages, tmp_path / "missing.onnx", is_warm=False)
    assert "installed package einops is damaged" in error
    assert str(packages / "einops-1.0.dist-info") in error


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers before 5.23 exports BERT without torchaudio",
)
def test_package_that_a_cell_of_a_sweep_cannot_import_is_named(packages: Path, tmp_path: Path) -> None:
    """The row has the message of the command, and is not reported as a bug of winml."""
    save_checkpoint("bert", tmp_path / "bert")
    (tmp_path / "models.txt").write_text("bert\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "winml.modelkit", "sweep", "models.txt", "-o", "swept", "--do", "export", "-f", "json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(packages)}, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    (cell,) = json.loads(done.stdout)["cells"]
    assert "the installed package torchaudio cannot be imported: OSError: libtorchaudio.so" in cell["problem"]
    assert "internal error" not in cell["problem"]
