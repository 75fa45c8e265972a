"""Processes of ours: packages of the starting process, and nothing from the working directory."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from winml.modelkit.ort.processes import (
    AnsweringProcess,
    module_path,
    process_context,
    start_process,
    start_python,
)

REPORT = """
import json, os, sys
with open(os.path.join({folder!r}, "report.json"), "w") as report:
    json.dump({{"path": sys.path, "arguments": sys.argv[1:], "folder": os.getcwd()}}, report)
"""
PLANTED = ("json", "multiprocessing", "pickle", "random", "runpy", "socket")


@pytest.fixture(name="hostile")
def make_hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory that is first on the path of this process, as in an interactive Python."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n", encoding="utf-8")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "reporting.py").write_text(REPORT.format(folder=str(tmp_path)), encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "modules"), *filter(None, sys.path)])
    return folder


def run_by_module(_folder: Path) -> None:
    """Run a module by its name."""
    with start_python("reporting", "one", "two", stdin=subprocess.DEVNULL) as process:
        assert 0 == process.wait(60)


def run_by_server(folder: Path) -> None:
    """Run a function in a process of multiprocessing, by the server if there is one."""
    process = start_process(process_context([]), runpy.run_path, str(folder.parent / "modules" / "reporting.py"))
    process.join(60)
    assert 0 == process.exitcode


def run_by_spawn(folder: Path) -> None:
    """Run the function without a server, as on Windows."""
    context = multiprocessing.get_context("spawn")
    process = start_process(context, runpy.run_path, str(folder.parent / "modules" / "reporting.py"))
    process.join(60)
    assert 0 == process.exitcode


def run_in_a_long_temporary_folder(folder: Path) -> None:
    """Run the function with a temporary folder too deep for the path of a server's socket."""
    (deep := folder.parent / ("long" * 30)).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(deep))
        run_by_server(folder)


@pytest.mark.parametrize("start", [run_by_module, run_by_server, run_by_spawn, run_in_a_long_temporary_folder])
def test_process_searches_the_path_without_the_working_directory(hostile: Path, start: Callable[[Path], None]) -> None:
    """The process runs in the folder all the same; the path of this process is unchanged."""
    before = list(sys.path)
    start(hostile)
    report = json.loads((hostile.parent / "report.json").read_text(encoding="utf-8"))
    assert hostile == Path(report["folder"])
    assert not {"", ".", str(hostile)} & {*report["path"]}
    assert str(hostile.parent / "modules") in report["path"]
    assert (["one", "two"] if start is run_by_module else report["arguments"]) == report["arguments"]
    assert not (hostile.parent / "mark").exists()
    assert before == sys.path


def test_path_is_absolute_and_contains_this_package(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absolute path is valid in another folder, and a package that the working directory provided is found."""
    monkeypatch.setattr(sys, "path", ["", ".", "sub"])
    import winml.modelkit

    assert [str(hostile / "sub"), str(Path(winml.modelkit.__path__[0]).parents[1])] == module_path()


def test_module_may_print_during_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that prints at import does not answer the first question."""
    (tmp_path / "talking_module.py").write_text(
        "print('hello', flush=True)\n"
        "from winml.modelkit.ort.processes import answer_questions\n"
        "answer_questions(lambda question, content: [question, len(content)])\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(AnsweringProcess("talking_module")) as process:
        assert [["a", 3], ["b", 0]] == [process.ask("a", b"xyz"), process.ask("b")]
