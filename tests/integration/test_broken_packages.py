"""An installed package that cannot be imported is named, whoever imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import save_checkpoint

BROKEN = {
    "torchaudio": 'raise OSError("libtorchaudio.so: undefined symbol: _ZN3c10")',
    "einops": 'raise ImportError("cannot import name rearrange")',
}
SCRIPT = "def build():\n    import {name}\n"
REMOTE = "import einops\nfrom transformers import PretrainedConfig\nclass C(PretrainedConfig):\n    pass\n"
REMOTE_CONFIG = '{"model_type": "own", "auto_map": {"AutoConfig": "code.C"}}'


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages that are installed and broken."""
    folder = tmp_path / "packages"
    for name, code in BROKEN.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code, encoding="utf-8")
        (folder / f"{name}-1.0.dist-info").mkdir()
        (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n", encoding="utf-8")
    return folder


def _inspect(packages: Path, *arguments: str | Path) -> str:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from winml.modelkit.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(packages), "inspect", *map(str, arguments)],
        cwd=packages, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert 1 == done.returncode
    assert "internal error" not in done.stderr
    return done.stderr


def test_package_that_transformers_imports_is_named(packages: Path, tmp_path: Path) -> None:
    """Though the model never asked for it."""
    folder = save_checkpoint("bert", tmp_path / "bert")
    error = _inspect(packages, "-m", folder)
    assert "torchaudio" in error


@pytest.mark.parametrize("name", BROKEN)
def test_package_that_a_script_imports_is_named_with_the_line(packages: Path, tmp_path: Path, name: str) -> None:
    """The user's line, and the package."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(name=name), encoding="utf-8")
    assert f"script.py:2: {name} cannot be imported: " in _inspect(packages, "-m", f"{script}:build")


def test_package_that_code_of_a_checkpoint_imports_is_named(packages: Path, tmp_path: Path) -> None:
    """Once that code may run."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(REMOTE_CONFIG, encoding="utf-8")
    (folder / "code.py").write_text(REMOTE, encoding="utf-8")
    error = _inspect(packages, "-m", folder / "config.json", "--trust-remote-code")
    assert "einops:" in error
