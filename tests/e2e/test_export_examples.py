"""Examples of README and guide, run as printed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from transformers.integrations import sdpa_attention

from e2e.workplace import Workplace

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"

DISPLAYED, *ANSWER = README.partition("```text\n$ winml export")[2].partition("```")[0].splitlines()
"""The options of the export in README, and its output."""


def _arguments(command: str, minilm_folder: Path) -> list[str]:
    """Return the arguments of ``winml export``, with the local checkpoint in place of its Hub id."""
    words = shlex.split(command, comments=True)
    return [word.replace(HUB_ID, str(minilm_folder)) for word in words]


def test_readme_tree_equals_the_command_output(workplace: Workplace, minilm_folder: Path) -> None:
    """Every line of tree and summary is compared, except for sizes and differences, which depend on the machine.

    An older transformers exports other numbers of nodes, so that lines are then compared without the numbers.
    """
    outcome = workplace.export(*_arguments(DISPLAYED, minilm_folder))
    assert 0 == outcome.code, outcome.err
    depends = ("verified", "wrote")
    shown = [line for line in ANSWER if not line.startswith(depends) and line != "…"]
    printed = outcome.out.splitlines()
    assert [] == _missing_lines(shown, printed)
    beginnings = [line.partition(" ")[0] for line in printed if line.startswith(depends)]
    assert ["verified", "wrote", "wrote"] == beginnings
    onnx.checker.check_model(workplace.folder / "model.onnx", full_check=True)


def _missing_lines(shown: list[str], printed: list[str]) -> list[str]:
    """Return the lines of README that are not printed; numbers of nodes count only with a recent transformers."""
    if hasattr(sdpa_attention, "pack_gqa"):
        return [line for line in shown if line not in printed]
    counted = re.compile(r"\b\d+(?= nodes\b| own\b| of \d+ nodes\b| %\))|(?<=direct )\d+")
    bare = [counted.sub("…", line) for line in printed]
    return [line for line in shown if counted.sub("…", line) not in bare]


def test_factory_module_is_imported_from_the_current_directory(workplace: Workplace, nets: Path) -> None:
    """``package.module:factory`` is searched as Python does, in the current directory first."""
    package = workplace.folder / "zoo"
    package.mkdir()
    shutil.copy(nets, package / "small.py")
    outcome = workplace.export("-m", "zoo.small:good", "-o", "net.onnx", "--torch-module", "Linear")
    assert 0 == outcome.code, outcome.err
    assert "inputs     input float32[3, 4]" in outcome.out
    assert "3 of 3 nodes" in outcome.out


def test_no_color_is_obeyed_and_pipes_get_plain_text(workplace: Workplace, nets: Path) -> None:
    """Emphasis is printed if requested, colour never if refused, and a pipe gets plain text."""
    arguments = ("-m", f"{nets}:good", "-o", "net.onnx", "-v", "--overwrite", "--no-verify")
    plain = workplace.export(*arguments)
    forced = replace(workplace, variables={"FORCE_COLOR": "1", "NO_COLOR": "1"}).export(*arguments)
    assert (0, 0) == (plain.code, forced.code)
    assert "\x1b" not in plain.out + plain.err
    assert not re.search(r"\x1b\[[0-9;]*[34]\d[m;]", forced.out)
    # The sidecar holds times, whose digits are not as many in each run.
    outputs = [re.sub(r"\(\d\S* \w*B\)", "(size)", outcome.out) for outcome in (plain, forced)]
    assert outputs[0] == re.sub(r"\x1b\[[0-9;]*m", "", outputs[1])


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no pseudo-terminals")
def test_terminal_shows_the_running_step(workplace: Workplace, nets: Path) -> None:
    """A step is shown before its end, and its result replaces the line."""
    screen, terminal = os.openpty()
    command = [*workplace.program, "export", "-m", f"{nets}:good", "-o", "net.onnx"]
    with subprocess.Popen(
        command, cwd=workplace.folder, env=workplace.environment(), stdout=subprocess.DEVNULL, stderr=terminal
    ) as process:
        os.close(terminal)
        shown = _read_all(screen)
    assert 0 == process.returncode
    assert "[4/8] ONNX export …\r[4/8] ONNX export" in shown


def _read_all(screen: int) -> str:
    chunks = []
    # A terminal whose last writer has left answers with an error on some systems, with nothing on others.
    with contextlib.suppress(OSError):
        while chunk := os.read(screen, 65536):
            chunks.append(chunk)
    os.close(screen)
    return b"".join(chunks).decode("utf-8")
