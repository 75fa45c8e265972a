"""Model code that exits, closes streams or changes the working directory: errors and restoration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from winml.modelkit.cli.main import main

NETS = """
import os, sys
import torch

class Stop(BaseException):
    pass

class Pressed(KeyboardInterrupt):
    pass

class Net(torch.nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear, self.act = torch.nn.Linear(4, 4), act
    def forward(self, values):
        self.act()
        return self.linear(values)

def stop():
    raise Stop("enough")

def press():
    raise Pressed

def interrupt():
    raise KeyboardInterrupt

def leave():
    sys.exit(0)

def close():
    sys.stdout.close()
    sys.stderr.close()

def move():
    os.chdir(os.path.dirname(os.__file__))

def example_inputs():
    return torch.ones(2, 4)

"""
ACTS = ("leave", "stop", "press", "interrupt", "close", "move")
NETS += "".join(
    f"def forward_{act}(): return Net({act})\ndef factory_{act}():\n    {act}()\n    return Net(lambda: None)\n"
    for act in ACTS
)
DELETING = "def build():\n    import shutil\n    shutil.rmtree(os.getcwd())\n    return Net(lambda: None)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with a script."""
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _export(capfd: pytest.CaptureFixture[str], model: str, *options: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["export", "-m", model, "-o", "new/model.onnx", *options])
    out, err = capfd.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize("place", ["forward", "factory"])
@pytest.mark.parametrize(
    ("act", "kind"),
    [("leave", "SystemExit: 0"), ("stop", "Stop: enough"), ("press", "Pressed"), ("interrupt", "KeyboardInterrupt")],
)
def test_exit_in_model_code_is_reported_with_its_line(
    folder: Path, capfd: pytest.CaptureFixture[str], place: str, act: str, kind: str
) -> None:
    """The exit code is 1, the message names the kind of exit, and no file is written."""
    code, out, err = _export(capfd, f"nets.py:{place}_{act}", "-q")
    line = next(number for number, text in enumerate(NETS.splitlines(), 1) if text == f"def {act}():") + 1
    assert (1, "") == (code, out)
    assert f"{folder / 'nets.py'}:{line}: " in err
    assert kind in err
    assert not (folder / "new").exists()


def test_exit_during_script_import_is_reported(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message names the line of the exit."""
    code, _, err = _export(capfd, "leaving.py:build", "-q")
    assert 1 == code
    assert f"{folder / 'leaving.py'}:2: SystemExit: 0" in err


@pytest.mark.parametrize("verb", [("inspect",), ("config",), ("perf", "--iterations", "1"), ("build", "-o", "built")])
def test_every_verb_reports_an_exit_in_model_code(
    folder: Path, capfd: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    """Other commands than the export report the exit as well."""
    with pytest.raises(SystemExit) as ended:
        main([*verb, "-m", "nets.py:factory_stop"])
    assert 1 == ended.value.code
    assert f"{folder / 'nets.py'}" in capfd.readouterr().err


@pytest.mark.parametrize("place", ["forward", "factory"])
@pytest.mark.parametrize("act", ["close", "move"])
def test_closed_streams_and_another_working_directory_do_not_outlast_the_models_code(
    folder: Path, capfd: pytest.CaptureFixture[str], place: str, act: str
) -> None:
    """The output is printed, and the file is written to the requested path."""
    code, out, err = _export(capfd, f"nets.py:{place}_{act}")
    assert 0 == code, err
    assert "ONNX Runtime equals PyTorch" in out
    assert "[8/8]" in err
    assert Path.cwd() == folder
    assert (folder / "new" / "model.onnx").is_file()


@pytest.mark.skipif(os.name == "nt", reason="this system keeps the working directory of a process")
def test_deleted_working_directory_is_recreated_for_the_output(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The output is written to the requested path."""
    here = folder / "here"
    here.mkdir()
    (folder / "deleting.py").write_text(NETS + DELETING, encoding="utf-8")
    os.chdir(here)
    try:
        code, _, err = _export(capfd, "../deleting.py:build")
    finally:
        os.chdir(folder)
    assert 0 == code, err
    assert (here / "new" / "model.onnx").is_file()
