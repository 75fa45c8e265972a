"""Completions of a shell, printed by the command and typed with Tab."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import onnx
import pytest

from architecture.sources import REPOSITORY
from e2e.in_process import run_here
from winml.modelkit.metadata_keys import MODULE_KEY, PART_KEY, TAG_KEY
from winml.modelkit.onnx.bundle import PartDescription

_GUIDE = REPOSITORY / "docs" / "guide" / "completions.md"
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?>=]*[ -/]*[@-~]|\][^\x07]*\x07|[()][0-9A-B]|[=>78M])|[\x07\x0e\x0f]")
_AT_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a shell with a terminal of its own as stdin, which fish needs."""
_PATIENCE_S = 60
"""Longest wait for a shell on a loaded machine."""


def _answer(**variables: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        outcome = run_here()
    assert (0, "") == (outcome.code, outcome.err)
    return outcome.out


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_shell_gets_a_script_that_asks_winml(shell: str) -> None:
    """The script of bash also checks the version of bash."""
    assert f"_WINML_COMPLETE={shell}_complete" in _answer(_WINML_COMPLETE=f"{shell}_source")


def test_verbs_and_options_are_completed() -> None:
    """The answer has the protocol of bash."""
    asked = {"_WINML_COMPLETE": "bash_complete"}
    assert ["plain,export", "plain,extract"] == _answer(**asked, COMP_WORDS="winml ex", COMP_CWORD="1").split()
    assert "plain,--dynamic-axes" in _answer(**asked, COMP_WORDS="winml export --dynamic", COMP_CWORD="2").split()


@pytest.mark.parametrize(
    "words",
    [
        "perf mod",
        "compare a.onnx mod",
        "compare a.onnx b.onnx --dataset mod",
        "export -m mod",
        "build -c mod",
        "quantize --calibration-data mod",
        "eval a.onnx --dataset mod",
        "generate built --reference mod",
    ],
)
def test_paths_are_left_to_the_shell(words: str) -> None:
    """The value may be a path or something else: a model, a data set, a config."""
    count = str(len(words.split()))
    assert "file,mod\n" == _answer(_WINML_COMPLETE="bash_complete", COMP_WORDS=f"winml {words}", COMP_CWORD=count)


def _completed(words: str) -> list[str]:
    """Return the completions that bash gets for the last word; a space at the end begins a new word."""
    count = len(words.split()) if not words.endswith(" ") else len(words.split()) + 1
    answer = _answer(_WINML_COMPLETE="bash_complete", COMP_WORDS=f"winml {words}", COMP_CWORD=str(count))
    return [line.removeprefix("plain,") for line in answer.split()]


def test_unknown_names_complete_to_nothing() -> None:
    """An unknown name, or a name from a missing model, has no completions."""
    for words in ("perf a.onnx --ep mod", "perf a.onnx --module mod", "quantize -m a.onnx --exclude mod"):
        assert [] == _completed(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("perf a.onnx --ep q", ["qnn"]),
        ("optimize -m a.onnx --ep open", ["openvino"]),
        ("export -m x --task text-cl", ["text-classification"]),
        ("config -m x -p w8", ["w8a8", "w8a16"]),
        ("quantize -m a.onnx --mode w", ["weight-only"]),
        ("tune -m x --only dynamic,q", ["dynamic,qdq"]),
        ("sweep plan.json --do export,p", ["export,perf"]),
    ],
)
def test_names_are_completed_from_their_registries(words: str, expected: list[str]) -> None:
    """The lists are those of execution providers, tasks, precisions, modes and steps; a name may follow a comma."""
    assert expected == _completed(words)


def _tagged(path: Path, modules: Mapping[str, str], part: PartDescription | None = None) -> None:
    """Write a model with a tagged node for each module path; it may be a part of a model of several."""
    names = ["x", *(f"y{number}" for number in range(len(modules)))]
    nodes = [onnx.helper.make_node("Relu", [read], [made]) for read, made in pairwise(names)]
    for node, (module, tag) in zip(nodes, modules.items(), strict=True):
        onnx.helper.set_model_props(node, {TAG_KEY: tag, MODULE_KEY: module})
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in (names[0], names[-1])]
    graph = onnx.helper.make_graph(nodes, "graph", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    if part is not None:
        onnx.helper.set_model_props(model, {PART_KEY: json.dumps(part.as_record())})
    onnx.save(model, path)


def test_selectors_are_completed_from_the_modules_of_the_model(tmp_path: Path) -> None:
    """The completions are module paths and class names, whether the model is an argument or an option."""
    model = tmp_path / "model.onnx"
    _tagged(model, {"encoder.0": "/Net/Encoder/Block.0", "encoder.1": "/Net/Encoder/Block.1", "head": "/Net/Head"})
    assert ["encoder.0", "encoder.1"] == _completed(f"quantize -m {model} --exclude enc")
    assert ["head"] == _completed(f"perf {model} --module h")
    assert ["Block"] == _completed(f"optimize -m {model} --module Bl")
    assert {"encoder.0", "encoder.1", "head", "Block", "Head"} <= {*_completed(f"inspect {model} --module ")}


def test_parts_and_their_modules_are_completed_from_the_folder_of_a_model(tmp_path: Path) -> None:
    """A model of one part has no part names to complete."""
    parts = ("encoder", "decoder")
    for part in parts:
        _tagged(tmp_path / f"{part}.onnx", {f"{part}.layer": f"/Net/{part}"}, PartDescription(part, parts))
    assert ["decoder"] == _completed(f"optimize -m {tmp_path} --submodel d")
    assert ["encoder.layer", "encoder"] == _completed(f"optimize -m {tmp_path} --exclude enc")
    (tmp_path / "decoder.onnx").unlink()
    assert [] == _completed(f"optimize -m {tmp_path / 'encoder.onnx'} --submodel ")


class _Terminal:
    """A shell at a terminal."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        """Start the shell, and wait for its prompt."""
        self._screen, terminal = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AT_A_TERMINAL, *command],
            cwd=folder,
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._shown = ""

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._screen, keys.encode())

    def shows(self, text: str) -> None:
        """Wait until the text appears in the output since the last call."""
        end = time.monotonic() + _PATIENCE_S
        while text not in (shown := _ESCAPES.sub("", self._shown).replace("\r", "")):
            ready, _, _ = select.select([self._screen], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} is not among {shown!r}"
            self._shown += os.read(self._screen, 65536).decode("utf-8", "replace")
        self._shown = shown.partition(text)[2]

    def end(self) -> None:
        """End the shell."""
        self._process.kill()
        self._process.wait()
        os.close(self._screen)


def _lines_of_guide(shell: str) -> str:
    (lines,) = re.findall(rf"^```{shell}\n(.*?)^```$", _GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(lines)


def _shell_with_guide(shell: str, home: Path) -> list[str]:
    """Write the lines of the guide into the file that it names, and return the command of the shell."""
    if shell == "fish":
        file = home / ".config" / "fish" / "completions" / "winml.fish"
        prompt, command = "function fish_prompt; echo -n 'ready> '; end", ["fish", "-C"]
        file.parent.mkdir(parents=True)
        file.write_text(_lines_of_guide(shell), encoding="utf-8")
        return [*command, prompt, "-i"]
    file = home / f".{shell}rc"
    file.write_text(f"PS1='ready> '\n{_lines_of_guide(shell)}", encoding="utf-8")
    return [shell, "--rcfile", str(file), "-i"] if shell == "bash" else [shell, "-i"]


def _version_of_bash() -> tuple[int, ...]:
    told = subprocess.run(["bash", "-c", "echo ${BASH_VERSINFO[@]:0:2}"], capture_output=True, text=True, check=True)
    return tuple(map(int, told.stdout.split()))


@pytest.mark.parametrize(
    "shell",
    [
        "bash",
        pytest.param("zsh", marks=pytest.mark.reader("zsh")),
        pytest.param("fish", marks=pytest.mark.reader("fish")),
    ],
)
def test_tab_completes_with_the_lines_of_the_guide(shell: str, tmp_path: Path) -> None:
    """A verb, an option, one of its values and a file are completed in a terminal."""
    if shell == "bash" and (sys.platform == "win32" or shutil.which(shell) is None):
        pytest.skip(f"{shell} is not installed")
    if shell == "bash" and _version_of_bash() < (4, 4):
        pytest.skip("the guide is for bash 4.4 and newer")
    home, programs, here = (tmp_path / name for name in ("home", "bin", "here"))
    for folder in (home, programs, here):
        folder.mkdir()
    (here / "model_of_mine.onnx").touch()
    program = programs / "winml"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m winml.modelkit "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    variables = {"HOME": str(home), "ZDOTDIR": str(home), "TERM": "xterm", "XDG_CONFIG_HOME": str(home / ".config")}
    environment = {**os.environ, **variables, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    terminal = _Terminal(_shell_with_guide(shell, home), here, environment)
    try:
        for typed, completed in (
            ("winml insp", "winml inspect"),
            ("winml optimize --enable-gelu-f", "winml optimize --enable-gelu-fusion"),
            ("winml export --dtype bf", "winml export --dtype bf16"),
            ("winml export -m mod", "winml export -m model_of_mine.onnx"),
        ):
            terminal.shows("ready> ")
            # Then "echo" at the begin of the line, and Enter.
            terminal.type(f"{typed}\t\x01echo \r")
            terminal.shows(f"\n{completed}\n")
    finally:
        terminal.end()
