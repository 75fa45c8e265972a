"""Runs the examples of a page as a reader would, and compares the output with the page.

The blocks of a page, in its order:

* a block of `sh`: every line is a command that ends with exit code 0, or with that of a comment `# exit code 3`; times
  that no page shows are measured with few runs;
* a block of `text` that begins with `$`: commands with their output below;
* a block of `python`: runs in the current directory, with the names of the blocks before it;
* a block of `text` behind a block of `python`: its output;
* a block behind `<!-- file: NAME -->`: a file;
* a block behind `<!-- not run: REASON -->`: not run. The tests count these blocks by page.

`<!-- given: bert as checkpoint; reviews.csv -->` names the files in the folder before the run: `supplies.py` makes it.
A line with nothing but `…` stands for any lines, `…` in a line for any characters. Behind `<!-- numbers differ -->`
fractions and numbers with a unit are those of one run on one machine; words, paths and counts are compared.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.workplace import Outcome

_BLOCK = re.compile(
    r"(?P<marks>(?:^<!-- [^\n]* -->\n+)*)^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"<!-- file: (\S+) -->")
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_GIVEN = re.compile(r"<!-- given: (.+?) -->")
_CODE = re.compile(r"#.*\bexit code (\d)")
_NUMBER = re.compile(
    r"(?<![\w./-])-?(?:\d[\d,]*\.\d+(?:e[-+]?\d+)?%?|[1-9]e-\d+|\d+(?= ?(?:ms|s|MB|kB|GB|dB|×|%)(?!\w))%?)(?![\w/])"
)
"""Measured numbers: fractions, and whole numbers with a unit. Counts, tensor sizes and paths are not measured."""
_MEASURED = "<!-- numbers differ -->"
_FEW_RUNS = ("--iterations", "10")
Runner = Callable[..., Outcome]


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    kind: str
    text: str
    file: str | None
    is_measured: bool
    why_not: str | None = None
    """Reason not to run the block."""


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    return [
        Block(
            found["kind"],
            found["text"],
            named[1] if (named := _FILE.search(found["marks"])) else None,
            _MEASURED in found["marks"],
            reason[1] if (reason := _NOT_RUN.search(found["marks"])) else None,
        )
        for found in _BLOCK.finditer(page)
    ]


def supplies_of(page: str) -> list[tuple[str, str]]:
    """Return (supply, path in the folder) that a page needs before its run; path "." keeps the supply's own name."""
    things = [thing.strip() for found in _GIVEN.findall(page) for thing in found.split(";")]
    parts = [thing.partition(" as ") for thing in things]
    return [(name, path or ".") for name, _, path in parts]


def matches(shown: str, printed: str, *, measured: bool = False) -> bool:
    """Return True if the text on a page matches the printed text."""
    shown_lines, printed_lines = (_lines(text, measured) for text in (shown, printed))
    pattern = "\n".join(
        r"(?:.*\n?)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) for line in shown_lines
    ).replace("(?:.*\\n?)*?\n", r"(?:.*\n)*?")
    return re.fullmatch(pattern, "\n".join(printed_lines)) is not None


_OF_THE_MACHINE = ("(VNNI)", "the machine seems busy", "ms per sample")


def _lines(text: str, measured: bool) -> list[str]:
    lines = [line.rstrip() for line in text.strip().splitlines()]
    # Lines that depend on the processor and its load are left out.
    lines = [line for line in lines if not any(words in line for words in _OF_THE_MACHINE)]
    # The width of a column depends on its numbers.
    return [re.sub(r" +", " ", _NUMBER.sub("#", line)).strip() for line in lines] if measured else lines


@dataclass
class PageRun:
    """Runs the blocks of one page in the current directory."""

    run: Runner
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str | None = None

    def check(self, page: str) -> None:
        """Run every block of a page and compare its printed output."""
        for block in blocks_of(page):
            for shown, printed in self.outputs(block):
                assert matches(shown, printed, measured=block.is_measured), f"shown:\n{shown}\nprinted:\n{printed}"

    def outputs(self, block: Block) -> Iterator[tuple[str, str]]:
        """Run a block; yield the text on the page and the printed text."""
        if block.why_not is not None:
            return
        printed, self.printed = self.printed, None
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.kind == "sh":
            for command in _commands(block.text):
                self._command(command, is_shown=False)
        elif block.kind == "python":
            self.printed = self._python(block.text)
        elif block.kind == "text" and block.text.startswith("$ "):
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield shown, self._command(command)
        elif block.kind == "text":
            assert printed is not None, f"nothing printed this before it:\n{block.text}"
            yield block.text, printed

    def _command(self, command: str, *, is_shown: bool = True) -> str:
        wanted = int(found[1]) if (found := _CODE.search(command)) else 0
        words, printed = shlex.split(command, comments=True), ""
        while words:
            assert words[0] == "winml", command
            end = words.index("|") if "|" in words else len(words)
            code = 0 if end < len(words) else wanted
            few = () if is_shown or words[1] != "perf" or "--iterations" in words else _FEW_RUNS
            outcome = self.run(*words[1:end], *few, stdin=printed)
            assert code == outcome.code, f"{command}\n{outcome.out}{outcome.err}"
            words, printed = words[end + 1 :], outcome.out
        return printed if not wanted or printed else "\n".join(outcome.complaint)

    def _python(self, text: str) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, "<page>", "exec"), self.namespace)
        return printed.getvalue()


def _commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
