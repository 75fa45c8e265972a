"""Errors about models and files that cannot be read at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from e2e.in_process import run_here
from fuzzed_commands import CommandProcess
from winml.modelkit.metadata_keys import COMPILE_KEY, EXPORT_KEY, INPUTS_KEY, MODEL_KEY
from winml.modelkit.options import JSON_LIMIT_BYTES

LONG = "a" * 300


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandProcess]:
    """A process with a time limit, so that waiting for a pipe is a failure."""
    process = CommandProcess()
    yield process
    process.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "-m", "a..b"), "a..b:"),
        (("export", "-m", "a--b", "-o", "x.onnx"), "a--b:"),
        (("inspect", "-m", "owner/name.git"), "owner/name.git: neither"),
        (("inspect", "-m", LONG), "a path"),
        (("inspect", f"{LONG}.onnx"), "be read"),
        (("perf", f"{LONG}.onnx"), "a path"),
        (("optimize", "-m", "x.onnx", "-o", f"{LONG}.onnx"), "a shorter name"),
        (("export", "-m", f"{LONG}.py:model", "-o", "x.onnx"), "a path"),
        (("export", "-m", f"{LONG}.onnx", "-o", "x.onnx", "--batch-size", "1"), "a path"),
        (("export", "-m", "~nobody-of-this-name/x.onnx", "-o", "x.onnx", "--batch-size", "1"), "a path"),
        (("inspect", "-m", "~nobody-of-this-name/x"), "a path"),
        (("inspect", "-m", "nul\0"), "a path"),
        (("config", "--check", LONG), "be read"),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, tuple) else None,
)
def test_empty_name_is_wrong_usage(commands: CommandProcess, arguments: tuple[str, ...], words: str) -> None:
    """The name is refused before a library fails on it."""
    ending = commands.run(*arguments)
    assert 2 == ending.code
    assert words in ending.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a file system with pipes")
@pytest.mark.parametrize("verb", ["inspect", "export", "build", "perf", "optimize", "config"])
@pytest.mark.parametrize("name", ["pipe", "pipe.onnx", "pipe.json"])
def test_pipe_is_no_model(commands: CommandProcess, verb: str, name: str, tmp_path: Path) -> None:
    """Without a writer, opening the pipe would wait for ever."""
    os.mkfifo(tmp_path / name)
    written = {"export": tmp_path / "o.onnx", "build": tmp_path / "o", "optimize": tmp_path / "o.onnx"}
    output = ("-o", str(written[verb])) if verb in written else ()
    ending = commands.run(verb, "-m", str(tmp_path / name), *output, seconds=20)
    assert 2 == ending.code


def test_endless_json_is_refused_at_the_limit(commands: CommandProcess, tmp_path: Path) -> None:
    """The file is not read until memory ends."""
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(JSON_LIMIT_BYTES + 1)
    ending = commands.run("config", "--check", str(large))
    assert 2 == ending.code
    assert f"is larger than {JSON_LIMIT_BYTES} bytes" in ending.stderr


def test_deep_config_is_refused(commands: CommandProcess, tmp_path: Path) -> None:
    """A deeply nested config is no recursion error."""
    (tmp_path / "config.json").write_text('{"model_type": "bert", "a": ' + "[" * 5000 + "]" * 5000 + "}")
    ending = commands.run("inspect", "-m", str(tmp_path))
    assert 1 == ending.code
    assert "nested too" in ending.stderr


_LITTLE_MEMORY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))
from winml.modelkit.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("key", "verbs"),
    [
        (INPUTS_KEY, ("perf", "optimize", "compare", "compile")),
        (MODEL_KEY, ("eval",)),
        (EXPORT_KEY, ("optimize", "compile")),
        (COMPILE_KEY, ("perf", "optimize", "quantize", "compare", "compile")),
    ],
)
def test_deeply_nested_metadata_counts_as_absent(here: Path, key: str, verbs: tuple[str, ...]) -> None:
    """Unreadable metadata counts as absent or as damaged, never as a bug of winml."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y) { a = Relu(x) y = Abs(a) }'
    )
    onnx.helper.set_model_props(model, {key: "[" * 100_000})
    onnx.save(model, "deep.onnx")
    (here / "a.csv").write_text("text\na\n", encoding="utf-8")
    arguments = {
        "perf": ("deep.onnx", "--iterations", "1"),
        "compare": ("deep.onnx", "deep.onnx"),
        "eval": ("deep.onnx", "--dataset", "a.csv"),
        "compile": ("-m", "deep.onnx", "-o", "compile.onnx", "--ep", "cpu"),
    }
    for verb in verbs:
        done = run_here(verb, *arguments.get(verb, ("-m", "deep.onnx", "-o", f"{verb}.onnx")))
        assert done.code in (0, 1, 2), verb
        assert "internal error" not in done.err, verb


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space of a process")
def test_lack_of_memory_is_reported_as_such(tmp_path: Path) -> None:
    """The libraries fail to load, each with its own message; a hint about the file would mislead."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    arguments = ("inspect", "-m", str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-c", _LITTLE_MEMORY, *arguments], capture_output=True, text=True, check=False
    )
    assert 1 == ran.returncode
    assert ran.stderr.startswith("error: not enough memory")
    assert "ulimit" in ran.stderr
