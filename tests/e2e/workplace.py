"""Workplaces of commands, with a folder and a home of their own, and the outcome of a command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from e2e.warm_processes import can_run_warm, run_warm

WITH_A_LIMIT = """
import resource, signal, sys
# As a full disk does, the limit makes writing fail; Python would otherwise be killed by the signal.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from winml.modelkit.cli.main import main
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""
"""Runs the command; its first argument is the size limit of written files, in bytes."""
SEVERAL = """
import json, sys
sys.path.insert(0, sys.argv[1])
from e2e.in_process import run_here
from torch_operators import share_operator_table
del sys.path[0]

outcomes = []
for command in json.load(sys.stdin):
    share_operator_table()
    outcome = run_here(*command)
    outcomes.append((outcome.code, outcome.out, outcome.err))
print(json.dumps(outcomes))
"""
"""Runs several commands, so that libraries are imported once; its argument is the folder of the tests."""
PROGRAM = (sys.executable, "-m", "winml.modelkit")
TIMEOUT_S = 300
_PROGRESS = re.compile(r"^\[\d/\d\] |^\w+ … \d+ s$")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command: exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> list[str]:
        """Return the lines of stderr that are no progress."""
        return [line for line in self.err.splitlines() if line and not _PROGRESS.match(line)]


@dataclass(frozen=True)
class Workplace:
    """A folder in which commands run, with a home and a folder for temporary files beside it."""

    root: Path
    program: tuple[str, ...] = PROGRAM
    variables: Mapping[str, str] = field(default_factory=dict)
    is_warm: bool = False
    """True if a program behind ``-c`` may run in a process that has imported the libraries already."""
    runs_here: bool = False
    """True to run ``winml`` in the process of the test, if no test looks at the process or its streams."""

    @property
    def folder(self) -> Path:
        """Return the current directory of the commands."""
        return self.root / "here"

    def environment(self) -> dict[str, str]:
        """Return the environment of the commands: without the developer's caches, and without network."""
        places = {name: str(self.root / "home") for name in ("HOME", "USERPROFILE", "LOCALAPPDATA", "XDG_CACHE_HOME")}
        places |= {name: str(self.root / "temporary") for name in ("TMPDIR", "TEMP", "TMP")}
        places["WINML_CACHE"] = str(self.root / "cache")
        hidden = {"HF_HOME", "HF_HUB_CACHE", "ORT_DISABLE_TELEMETRY", "FORCE_COLOR", "NO_COLOR"}
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        return {**kept, **places, "HF_HUB_OFFLINE": "1", **self.variables}

    def export(self, *arguments: str | Path) -> Outcome:
        """Run ``winml export``."""
        return self.winml("export", *arguments)

    def winml(self, *arguments: str | Path, stdin: str = "") -> Outcome:
        """Run any verb: in this process if ``runs_here`` is set, else in a warm process or one of its own."""
        if self.runs_here and self.program == PROGRAM and "PYTHONPATH" not in self.variables:
            return self._run_here(arguments, stdin)
        if self.program == PROGRAM and "PYTHONPATH" not in self.variables and can_run_warm():
            words = [str(argument) for argument in arguments]
            return Outcome(*run_warm(words, self.folder, self.environment(), stdin, TIMEOUT_S))
        if self.is_warm and can_run_warm():
            _, _, program, *words = (*self.program, *map(str, arguments))
            return Outcome(*run_warm(words, self.folder, self.environment(), stdin, TIMEOUT_S, program))
        done = subprocess.run(
            [*self.program, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment(),
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=TIMEOUT_S,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def winml_in_turn(self, *commands: Sequence[str | Path]) -> list[Outcome]:
        """Run several commands in one process of the interpreter of this workplace."""
        program = (self.program[0], "-c", SEVERAL, str(Path(__file__).parents[1]))
        words = json.dumps([[str(word) for word in command] for command in commands])
        done = replace(self, program=program).winml(stdin=words)
        assert 0 == done.code, done.err
        return [Outcome(*outcome) for outcome in json.loads(done.out)]

    def _run_here(self, arguments: Sequence[str | Path], stdin: str) -> Outcome:
        from huggingface_hub import constants

        from e2e.in_process import run_here  # it imports this module

        environment = self.environment()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(tempfile, "tempdir", None)
            # Values that libraries read at their import, the home above all, would not change in this process.
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
            patch.setattr(constants, "HF_HUB_CACHE", str(self.root / "home" / "hub"))
            for name in {*os.environ} - {*environment}:
                patch.delenv(name)
            for name in ("WINML_CACHE", "TMPDIR", "TEMP", "TMP", *self.variables):
                patch.setenv(name, environment[name])
            return run_here(*arguments, stdin=stdin)

    def files(self) -> dict[str, bytes]:
        """Return the content of every file in the current directory, by path, hidden files included."""
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes() if path.is_file() else b"(folder)"
            for path in self.folder.rglob("*")
        }

    def refuse(self, *arguments: str | Path, code: int, words: tuple[str, ...]) -> Outcome:
        """Run ``winml export`` and check all that holds for every failure.

        It exits with ``code``, stdout is empty, stderr holds one sentence and a next step with all of ``words`` in
        them and no traceback, and the folder is as it was.
        """
        before = self.files()
        outcome = self.export(*arguments)
        assert code == outcome.code, outcome.err
        assert outcome.out == ""
        assert before == self.files()
        assert "Traceback" not in outcome.err
        assert "internal error" not in outcome.err
        assert outcome.complaint[0].startswith("error")
        steps = [line for line in outcome.complaint[1:] if line != "Type:"]
        assert len(steps) == 1, f"one sentence, one next step: {outcome.complaint}"
        assert [] == [word for word in words if word not in "\n".join(outcome.complaint)], outcome.complaint
        return outcome
