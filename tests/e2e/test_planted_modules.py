"""Modules in the working directory with names of Python's and libraries' modules: no verb runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from checkpoints import one_layer
from e2e.nets import __file__ as nets
from evaluation_checkpoints import save_task_checkpoint, sentences, text_tokenizer
from generating import PROMPT, save_decoder
from module_chains import save_chain
from winml.modelkit.cli.main import COMMANDS

PLANTED = ("json", "multiprocessing", "numpy", "onnxruntime", "random", "signal", "socket")
SEVERAL = """
import sys
from winml.modelkit.cli.main import main

for line in open(sys.argv[1], encoding="utf-8"):
    try:
        main(line.rstrip("\\n").split("\\t"))
    except SystemExit as leave:
        print("code", leave.code)
"""
"""Runs commands one after the other, each with the module path of the console script."""
CHAIN = ("-m", "chain.onnx", "-o")
IN_ONE_PROCESS = (
    ("cache", "ls"),
    ("inspect", "chain.onnx"),
    ("diff", "chain.onnx", "chain.onnx"),
    ("compare", "chain.onnx", "chain.onnx"),
    ("optimize", *CHAIN, "optimized.onnx"),
    ("quantize", *CHAIN, "quantized.onnx", "--precision", "int8"),
    ("compile", *CHAIN, "compiled.onnx", "--ep", "cpu"),
    ("extract", "chain.onnx", "--module", "c", "-o", "extracted"),
    ("retag", "chain.onnx", "bare.onnx", "-o", "retagged.onnx"),
    ("perf", "chain.onnx", "--iterations", "2"),
    ("run", "chain.onnx", "--input", f"x={[[1.0] * 32]}"),
    ("config", "-m", "decoder", "-o", "config.json"),
    ("export", "-m", f"{nets}:good", "-o", "exported.onnx", "--proof"),
    ("verify", "exported.onnx"),
    ("view", "chain.onnx", "-o", "page.html"),
    ("build", "-m", "decoder", "-o", "built", "--level", "none", "--no-verify", "--refittable"),
    ("refit", "built", "--weights", "decoder", "-o", "refitted"),
    ("generate", "built", "-p", PROMPT, "--max-new-tokens", "2"),
    ("eval", "classifier", "--dataset", "texts.csv", "--samples", "4"),
)
IN_THEIR_OWN = (
    ("sys",),
    ("tune", *CHAIN, "tuned", "--target", "size", "--only", "dynamic", "--min-sqnr", "20"),
    ("sweep", "models.txt", "-o", "swept", "--do", "build"),
)
"""Commands that start processes, or none."""


@pytest.fixture(scope="module", name="hostile")
def make_hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and a data set in one folder, with modules that leave a mark when they run."""
    folder = tmp_path_factory.mktemp("hostile") / "here"
    folder.mkdir()
    (folder.parent / "marks").mkdir()
    save_chain(folder / "chain.onnx")
    save_chain(folder / "bare.onnx", tagged=False)
    (folder / "models.txt").write_text("chain.onnx\n", encoding="utf-8")
    save_decoder(folder / "decoder", **one_layer("llama"))
    labels = ["bad", "good"]
    save_task_checkpoint(
        folder / "classifier", "bert", "BertForSequenceClassification", text_tokenizer(), labels=labels
    )
    datasets.Dataset.from_dict({"text": sentences(4), "label": labels * 2}).to_csv(folder / "texts.csv")
    for name in PLANTED:
        mark = folder.parent / "marks" / name
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    return folder


def run(hostile: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder, without environment variables that keep the folder off the path."""
    hidden = ("PYTHONSAFEPATH", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    own = {"WINML_CACHE": str(hostile.parent / "cache"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=hostile, env={**kept, **own}, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip


def marks(hostile: Path) -> list[str]:
    """Return the names of planted modules that ran."""
    return sorted(path.name for path in (hostile.parent / "marks").iterdir())


def test_every_verb_is_run_here() -> None:
    assert sorted(COMMANDS) == sorted(command[0] for command in (*IN_ONE_PROCESS, *IN_THEIR_OWN))


def test_verbs_run_no_planted_module(hostile: Path) -> None:
    """One process runs all verbs, so the first import of each library happens in one of these verbs."""
    script, commands = hostile.parent / "several.py", hostile.parent / "commands"
    script.write_text(SEVERAL, encoding="utf-8")
    commands.write_text("".join("\t".join(command) + "\n" for command in IN_ONE_PROCESS), encoding="utf-8")
    done = run(hostile, script, commands)
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("code ")]
    assert [(command[0], "0") for command in IN_ONE_PROCESS] == [
        (command[0], code) for command, code in zip(IN_ONE_PROCESS, codes, strict=True)
    ], done.stderr
    assert [] == marks(hostile)


@pytest.mark.parametrize("command", IN_THEIR_OWN, ids=lambda command: command[0])
def test_verb_that_starts_processes_runs_no_planted_module(hostile: Path, command: tuple[str, ...]) -> None:
    """The module runs neither in the command nor in its workers, the fork server or its tracker."""
    done = run(hostile, Path(sys.executable).with_name("winml"), *command)
    assert 0 == done.returncode, done.stderr
    assert [] == marks(hostile)


def test_module_run_by_python_runs_no_planted_module(hostile: Path) -> None:
    """``python -m winml.modelkit`` searches the folder for the package itself only."""
    done = run(hostile, "-m", "winml.modelkit", "inspect", "chain.onnx", "-f", "json")
    assert 0 == done.returncode, done.stderr
    assert json.loads(done.stdout)
    assert [] == marks(hostile)
