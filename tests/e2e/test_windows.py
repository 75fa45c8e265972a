"""Unit tests and every verb with Python, ONNX Runtime and PyTorch for Windows, under Wine.

Tests of ``tests/unit/cli/test_windows.py`` for drives, open files and code pages are among the unit tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY
from coded_checkpoints import save_gguf_of
from e2e.in_process import run_here
from e2e.other_environment import run_elsewhere
from evaluation_checkpoints import WORDS, save_task_checkpoint, sentences, text_tokenizer
from generating import build_decoder, save_decoder
from readers import python_of
from winml.modelkit.cli.main import COMMANDS

READER = "windows"
pytestmark = [pytest.mark.reader(READER), pytest.mark.slow]

_MOST_FAILURES = "20"
"""Chosen: a log of more failures is not read."""
_LONG_FOLDERS = ("tests/unit/ort", "tests/unit/quantize")
"""Half of the time of the unit tests. Both halves wait for Wine's server most of it, so they run at the same time."""
_HALVES = {"long": _LONG_FOLDERS, "others": ("tests/unit", *(f"--ignore={name}" for name in _LONG_FOLDERS))}
_LEAST_PASSED = 300
"""Chosen: of 800 and 1,700 unit tests without torch; several hundred are skipped on a processor with AMX."""
EXPORT = ["export", "-m", "bert", "-o", "exported/model.onnx", "--proof", "--dynamic-batch"]
RUN = ["run", "exported/model.onnx", "--text", " ".join(WORDS[:4]), "-f", "json"]
GENERATE = ["generate", "decoder", "-p", "hello", "--max-new-tokens", "4", "-f", "json"]
VERBS = (
    EXPORT,
    RUN,
    GENERATE,
    ["sys", "-f", "json"],
    ["config", "-m", "bert"],
    ["build", "-m", "bert", "-o", "built", "-p", "fp16", "--refittable"],
    ["refit", "built", "--weights", "bert", "-o", "refitted"],
    ["inspect", "exported/model.onnx", "-H"],
    ["optimize", "-m", "exported/model.onnx", "-o", "optimized.onnx", "--level", "full"],
    ["quantize", "-m", "exported/model.onnx", "-o", "fp16.onnx", "-p", "fp16"],
    ["compile", "-m", "exported/model.onnx", "-o", "compiled.onnx", "--ep", "cpu"],
    ["perf", "exported/model.onnx", "--iterations", "2", "--by-module"],
    ["compare", "bert", "exported/model.onnx", "--by-module"],
    ["verify", "exported"],
    ["view", "exported/model.onnx", "optimized.onnx", "-o", "pair.html"],
    ["diff", "exported/model.onnx", "exported/model.onnx"],
    ["eval", "exported/model.onnx", "--dataset", "texts.csv", "--baseline", "none"],
    ["extract", "exported/model.onnx", "--module", "BertLayer", "-o", "extracted"],
    ["retag", "exported/model.onnx", "optimized.onnx", "-o", "retagged.onnx"],
    ["tune", "exported/model.onnx", "-o", "tuned", "--target", "size", "--only", "level"],
    ["sweep", "plan.txt", "-o", "swept", "--jobs", "1"],
    ["cache", "ls"],
    # Temporary files are on drive C:, this folder is on Z:.
    ["inspect", "model.gguf"],
)

ON_ABSENT_DRIVE = [
    line.split()
    for line in (
        r"export -m bert -o Q:\x.onnx",
        r"build -m bert -o Q:\x",
        r"refit built --weights bert -o Q:\x",
        r"optimize exported/model.onnx -o Q:\x.onnx",
        r"quantize exported/model.onnx -o Q:\x.onnx",
        r"compile exported/model.onnx --ep cpu -o Q:\x.onnx",
        r"perf exported/model.onnx --report Q:\x.html",
        r"compare exported/model.onnx optimized.onnx --by-module --report Q:\x.html",
        r"eval exported/model.onnx --dataset texts.csv --baseline none -o Q:\x.json",
        r"extract exported/model.onnx --module BertLayer -o Q:\x",
        r"retag exported/model.onnx optimized.onnx -o Q:\x.onnx",
        r"tune exported/model.onnx -o Q:\x",
        r"sweep plan.txt -o Q:\x",
        r"view exported/model.onnx -o Q:\x.html",
        r"config -m bert -o Q:\x.json",
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of a classifier and of a decoder, the decoder's build, a data set and a plan."""
    path = tmp_path_factory.mktemp("windows")
    name = "BertForSequenceClassification"
    save_task_checkpoint(path / "bert", "bert", name, text_tokenizer(), labels=("a", "b"), num_hidden_layers=1)
    build_decoder(save_decoder(path / "llama"), path / "decoder", config={"optim": None})
    save_gguf_of(path, "qwen2").rename(path / "model.gguf")
    rows = (f"{text},{'ab'[number % 2]}" for number, text in enumerate(sentences(4)))
    (path / "texts.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    (path / "plan.txt").write_text("exported/model.onnx\n", encoding="utf-8")
    return path


def test_every_verb_succeeds_with_the_results_of_this_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported file is equal byte by byte, and the tokens of a decoder are equal. An absent drive is an error."""
    assert {*COMMANDS} == {words[0] for words in VERBS}
    monkeypatch.setenv("WINML_CACHE", str(folder / "cache"))
    done = run_elsewhere(python_of(READER), folder, [*VERBS, *ON_ABSENT_DRIVE])
    assert [] == [(words, messages) for words, (code, _, messages) in zip(VERBS, done, strict=False) if code]
    refused = zip(ON_ABSENT_DRIVE, done[len(VERBS) :], strict=True)
    assert [] == [(words, code, said) for words, (code, _, said) in refused if code != 1 or "Q:" not in said]
    monkeypatch.chdir(folder)
    exported = Path("exported/model.onnx").read_bytes()
    (_, answer, _), (_, text, _) = done[1:3]
    assert json.loads(run_here(*GENERATE).out)["tokens"] == json.loads(text)["tokens"]
    scores, expected = (
        {entry["label"]: entry["score"] for entry in json.loads(printed)["entries"]}
        for printed in (answer, run_here(*RUN).out)
    )
    # Kernels of the two builds add in different orders.
    assert expected == pytest.approx(scores, abs=1e-5)
    assert 0 == run_here(*EXPORT, "--overwrite").code
    assert exported == Path("exported/model.onnx").read_bytes()


@pytest.mark.parametrize("half", _HALVES)
def test_unit_tests_that_need_no_torch_pass(half: str) -> None:
    """Tests that import torch or transformers are skipped: torch ends long processes under Wine."""
    places = [REPOSITORY / name for name in ("src", "tests")]
    options = [
        "-p", "under_wine", "-p", "no:cacheprovider", "-o", "tmp_path_retention_policy=none", "-q", "-rfE",
        f"--maxfail={_MOST_FAILURES}",
        # Pytest would remove files of the other half in a folder that both share.
        f"--basetemp=C:/tests-{half}",
    ]  # fmt: skip
    done = subprocess.run(
        [python_of(READER), "-m", "pytest", *options, *_HALVES[half]], cwd=REPOSITORY, input="", capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}, encoding="utf-8", errors="replace",
        check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stdout.partition("= FAILURES =")[2] or done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= _LEAST_PASSED
