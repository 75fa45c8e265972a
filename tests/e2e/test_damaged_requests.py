"""Damaged names, numbers and stored files: one sentence each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e import workplace as workplaces
from e2e.in_process import run_here
from e2e.workplace import Workplace
from winml.modelkit.cli import _errors

LONG = "n" * 250
NOT_TEXT = os.fsdecode(b"na\xffme") if sys.platform != "win32" else "na\ud800me"


@pytest.mark.parametrize(
    "command",
    [
        ("quantize", "-m", "{model}", "-o", NOT_TEXT + ".onnx"),
        ("compare", NOT_TEXT, "{model}"),
        ("compare", "{model}", "{model}", "-o", NOT_TEXT),
        ("tune", "-m", "{model}", "-o", NOT_TEXT),
        ("eval", "{model}", "--dataset", NOT_TEXT),
        ("generate", "{model}", "-p", NOT_TEXT),
        ("cache", "clean", "--older-than", "nan"),
        ("tune", "-m", "{model}", "-o", "tuned", "--min-sqnr", "nan"),
        ("generate", "{model}", "-p", "x", "--temperature", "nan"),
        ("perf", "-m", "{model}", "--iterations", str(10**24)),
        ("perf", "-m", "{model}", "--warmup", str(10**24)),
        ("eval", "{model}", "--dataset", "x.jsonl", "--samples", str(10**24)),
    ],
    ids=" ".join,
)
def test_meaningless_value_is_wrong_usage(small_file: Path, here: Path, command: tuple[str, ...]) -> None:
    """The values are names that are no text, and numbers that are no number or too large."""
    outcome = run_here(*(word.format(model=small_file) for word in command))
    assert 2 == outcome.code, outcome.err
    assert "internal error" not in outcome.err
    assert [] == list(here.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ("quantize", "-m", "{model}", "-o", LONG * 2 + ".onnx"),
        ("quantize", "-m", LONG + "/x.onnx", "-o", "x.onnx"),
        ("compare", LONG * 2, "{model}"),
        ("tune", "-m", LONG * 2, "-o", "tuned"),
        ("tune", "-m", "{model}", "-o", LONG * 2),
        ("eval", "{model}", "--dataset", LONG * 2),
        ("eval", "{model}", "--dataset", LONG + ".csv"),
        ("export", "-m", "{checkpoint}", "-o", LONG + ".onnx"),
        ("build", "-m", "{checkpoint}", "-o", LONG * 2),
        ("diff", LONG * 2, "{model}"),
    ],
    ids=lambda command: command[0],
)
def test_overlong_name_is_reported(small_file: Path, small_bert: Path, here: Path, command: tuple[str, ...]) -> None:
    """Either the command or the system reports it, in one sentence."""
    outcome = run_here(*(word.format(model=small_file, checkpoint=small_bert) for word in command))
    assert outcome.code in (1, 2), outcome.err
    assert "internal error" not in outcome.err
    assert len([line for line in outcome.complaint if line.startswith("error")]) == 1


def test_unwritable_result_is_a_failure(small_file: Path, tmp_path: Path, workplace: Workplace) -> None:
    """The exit code is 1, whether the result was positive or negative."""
    if not Path("/dev/full").exists():
        pytest.skip("needs the device /dev/full")
    import onnx

    other = tmp_path / "other.onnx"
    model = onnx.load(small_file)
    model.graph.node[0].name = "another"
    model.graph.node.append(onnx.helper.make_node("Identity", [model.graph.output[0].name], ["copy"]))
    onnx.save(model, other)
    assert 3 == run_here("diff", small_file, other).code
    for file in (other, small_file):
        outcome = _into_full(workplace, "diff", small_file, file)
        assert (1, 2) == outcome


def _into_full(workplace: Workplace, *arguments: str | Path) -> tuple[int, int]:
    """Return the exit code of a command with a full stdout, and the number of lines on stderr."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*workplaces.PROGRAM, *map(str, arguments)],
            stdout=full,
            stderr=subprocess.PIPE,
            env=workplace.environment(),
            cwd=workplace.folder,
            check=False,
        )
    return done.returncode, len(done.stderr.splitlines())


@pytest.mark.parametrize("command", [(), ("--chat",)])
def test_stdin_without_text_is_wrong_usage(llama: Path, workplace: Workplace, command: tuple[str, ...]) -> None:
    """The input has a wrong encoding, or half a character if Python has no encoding."""
    done = subprocess.run(
        [*workplaces.PROGRAM, "generate", str(llama), "-p", "-", *command],
        input=b"the \xff king",
        capture_output=True,
        env=workplace.environment(),
        cwd=workplace.folder,
        check=False,
    )
    assert (2, b"") == (done.returncode, done.stdout), done.stderr
    assert b"stdin is not" in done.stderr


def test_lack_of_memory_names_the_file(small_file: Path) -> None:
    """The error itself holds nothing but its class."""
    assert 0 == run_here("inspect", small_file).code
    assert str(small_file) in _errors.out_of_memory_error(MemoryError()).message


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"folder": 3}',
        b'{"folder": "a\\u0000b"}',
        b"[" * 100_000,
        b'{"folder": "%s"}' % (b"n" * 5000),
    ],
    ids=lambda note: repr(note[:20]),
)
def test_damaged_cache_note_is_ignored(here: Path, note: bytes) -> None:
    """The build is listed, and removed as one without a model."""
    root = here.parent / "cache"
    build = root / "builds" / f"model-{'0' * 16}"
    build.mkdir(parents=True)
    (build / "build_manifest.json").write_bytes(note)
    for name in ("stages", "digests", "open_sizes"):
        (root / name).mkdir()
        (root / name / f"{'0' * 64}.json").write_bytes(note)
    for command in (("ls",), ("clean", "--dry-run"), ("clean", "--older-than", "9999"), ("clean",)):
        outcome = run_here("cache", *command)
        assert (0, "") == (outcome.code, outcome.err)
    assert not build.exists()
