"""``winml build``: exit codes, contents of stdout and stderr, and files of the folder."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from e2e.workplace import Workplace

_FLAGS = ("-c", '{"optim": {"gelu_fusion": true}}')

_MODULES = """
import sys
from winml.modelkit.cli.main import main
try:
    main()
except SystemExit as stop:
    heavy = {"torch", "transformers"} & set(sys.modules)
    print(f"imported {sorted(heavy)}", file=sys.stderr)
    raise
"""


@pytest.fixture(scope="module")
def built(make_workplace: Callable[[], Workplace], bert_tiny: Path) -> Workplace:
    """A workplace with a build in the folder ``out``."""
    workplace = make_workplace()
    outcome = workplace.winml("build", "-m", bert_tiny, "-o", "out", *_FLAGS)
    assert 0 == outcome.code, outcome.err
    assert [] == outcome.complaint
    assert "[1/4] export" in outcome.err
    assert "next      winml run out --schema" in outcome.out  # no tokenizer lies there
    assert "skipped: no precision was requested (--precision)" in outcome.out
    assert "skipped: no execution provider is specified (compile.ep)" in outcome.out
    return workplace


@pytest.fixture
def place(built: Workplace, workplace: Workplace) -> Workplace:
    """A copy of the workplace with the build."""
    shutil.copytree(built.folder / "out", workplace.folder / "out")
    return workplace


def refuse(workplace: Workplace, *arguments: str | Path, code: int, words: str) -> None:
    """Check that a build is refused in one or two sentences, and changes no file."""
    before = workplace.files()
    outcome = workplace.winml("build", *arguments)
    assert code == outcome.code, outcome.err
    assert "" == outcome.out
    assert words in "\n".join(outcome.complaint)
    assert "Traceback" not in outcome.err
    sentences = [line for line in outcome.complaint if line != "Type:" and not line.startswith("  winml ")]
    assert len(sentences) in (1, 2), outcome.complaint
    assert before == workplace.files()


def test_second_build_reuses_all_without_importing_torch(place: Workplace, bert_tiny: Path) -> None:
    """Stdout is one JSON object: the manifest, its folder and a version."""
    looking = Workplace(place.root, (sys.executable, "-c", _MODULES))
    outcome = looking.winml("build", "-m", bert_tiny, "-o", "out", *_FLAGS, "--no-quant", "--format", "json")
    assert 0 == outcome.code, outcome.err
    assert outcome.err.endswith("imported []\n")
    record = json.loads(outcome.out)
    assert ("out", 1) == (record.pop("folder"), record.pop("schema_version"))
    assert record == json.loads(place.files()["out/build_manifest.json"])
    assert ["reused", "reused", "skipped", "skipped"] == [stage["status"] for stage in record["parts"][0]["stages"]]
    assert "--no-quant" == record["parts"][0]["stages"][2]["reason"]


def test_precision_option_overrides_a_config_without_precision(place: Workplace, bert_tiny: Path) -> None:
    """The model has the precision of the command line; without a precision, the stage says that none was requested."""
    flags = ("-c", '{"optim": {"gelu_fusion": true}, "quant": null}', "--precision", "int8", "--exclude", "BertPooler")
    outcome = place.winml("build", "-m", bert_tiny, "-o", "out", *flags)
    assert 0 == outcome.code, outcome.err
    assert "int8 (dynamic)" in outcome.err
    files = place.files()
    assert files["out/quantized.onnx"] == files["out/model.onnx"]
    assert {"precision": "int8", "exclude": ["BertPooler"]}.items() <= json.loads(files["out/winml_build_config.json"])[
        "quant"
    ].items()
    missing = place.winml("build", "-m", bert_tiny, "-o", "out", *_FLAGS, "-p", "int8", "--exclude", "Nowhere")
    assert 2 == missing.code
    assert "Nowhere" in missing.err


def test_no_optimize_leaves_the_export_as_the_model(place: Workplace, bert_tiny: Path) -> None:
    """The file of the skipped stage is removed."""
    outcome = place.winml("build", "-m", bert_tiny, "-o", "out", *_FLAGS, "--no-optimize", "-q")
    assert (0, "", "") == (outcome.code, outcome.out, outcome.err)
    files = place.files()
    assert "out/optimized.onnx" not in files
    assert files["out/export.onnx"] == files["out/model.onnx"]


def test_second_build_in_a_folder_waits_for_the_first(place: Workplace, bert_tiny: Path) -> None:
    """The second build reports that it waits, and then reuses all stages."""
    lock = filelock.FileLock(place.folder / "out" / ".winml-build.lock")
    command = [*place.program, "build", "-m", str(bert_tiny), "-o", "out", *_FLAGS]
    with lock:
        process = subprocess.Popen(
            command, cwd=place.folder, env=place.environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("another build works in out: waiting")
    out, _ = process.communicate(timeout=120)
    assert 0 == process.returncode
    assert 2 == out.count("reused")


def test_build_accepts_a_generated_config(workplace: Workplace, bert_tiny: Path) -> None:
    """The config has the model and its dynamic dimensions; the build resolves it to an equal config."""
    asked = ("--dynamic-batch", "--shape-config", '{"sequence_length": 16}', "--no-quant", "--no-compile")
    assert 0 == workplace.winml("config", "-m", bert_tiny, *asked, "-o", "config.json").code
    outcome = workplace.winml("build", "-c", "config.json", "-o", "out")
    assert 0 == outcome.code, outcome.err
    config, resolved = (json.loads(workplace.files()[name]) for name in ("config.json", "out/winml_build_config.json"))
    assert 17 == resolved["export"]["opset_version"]
    assert config == resolved
    assert ["batch_size", 16] == resolved["export"]["input_tensors"][0]["shape"]


def test_use_cache_builds_in_the_cache(place: Workplace) -> None:
    """Nothing appears in the current directory; the JSON has the folder."""
    before = place.files()
    outcome = place.winml("build", "-m", "out/export.onnx", "--use-cache", "--format", "json", "-q")
    assert 0 == outcome.code, outcome.err
    folder = Path(json.loads(outcome.out)["folder"])
    assert place.root / "cache" in folder.parents
    assert (folder / "model.onnx").is_file()
    assert before == place.files()


def test_ignored_option_is_reported(place: Workplace) -> None:
    """``--skip-pre-normalization`` is ignored if the optimizer needs the normalized graph."""
    arguments = ("-m", "out/export.onnx", "-o", "other", "--level", "basic", "--skip-pre-normalization")
    outcome = place.winml("build", *arguments)
    assert 0 == outcome.code, outcome.err
    assert "--skip-pre-normalization is ignored" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "new"), "no model"),
        (("-m", "out/model.onnx"), "output folder"),
        (("-m", "out/model.onnx", "-o", "new", "--use-cache"), "--use-cache cannot"),
        (("-m", "out/model.onnx", "-o", "out"), "would replace"),
        (("-m", "missing.onnx", "-o", "new"), "no such"),
        (("-m", "out/model.onnx", "-o", "new", "--task", "fill-mask"), "--task"),
        (("-m", "out/model.onnx", "-o", "new", "--ep", "qmm"), "execution provider"),
        (("-m", "out/model.onnx", "-o", "new", "--level", "basic", "--no-optimize"), "--level"),
        (("-m", "out/model.onnx", "-o", "new", "-c", '{"optim": {"gelu_fusio": true}}'), "gelu_fusion"),
        (("-m", "out/model.onnx", "-o", "new", "-c", '{"optim": {"ep": ""}}'), "optim.ep"),
        (("-m", "out/model.onnx", "-o", "new", "-c", ""), "'--config':"),
        (("-m", "out/model.onnx", "-o", "out/model.onnx"), "a file"),
        (("-m", "out/model.onnx", "-o", "new", "--optimise"), "such option"),
        (("-m", "./nowhere", "-o", "new"), "no such"),
        (("-m", "out/model.onnx", "-o", "new", "--exclude", "a", "--no-quant"), "--exclude"),
        (("-m", "out/model.onnx", "-o", "new", "--operators", "standard", "--layout", "genai"), "--layout genai"),
        (("-m", "out/model.onnx", "-o", "new", "--operators", "standard", "-p", "int2"), "--precision int2"),
        (("-m", "out/model.onnx", "-o", "new", "--operators", "standard", "-p", "nf4"), "--precision nf4"),
        (("-m", "out/model.onnx", "-o", "new", "--operators", "standard", "--no-optimize"), "--no-optimize"),
        (("-m", "out/model.onnx", "-o", "new", "--min-sqnr", "20"), "neither quantizes nor compiles"),
        (("-m", "out/model.onnx", "-o", "new", "--min-sqnr", "20", "--no-quant"), "--no-quant"),
        (("-m", "out/model.onnx", "-o", "new", "-p", "int4", "--mode", "qdq"), "--mode qdq"),
        (("-m", "out/model.onnx", "-o", "new", "-p", "int3"), "'int3'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[2:]),
)
def test_wrong_usage_is_refused(place: Workplace, arguments: tuple[str, ...], words: str) -> None:
    """The exit code is 2, and nothing is written."""
    refuse(place, *arguments, code=2, words=words)


@pytest.mark.parametrize(
    ("output", "code"), [("x" * 300, 2), (f"new/{'x' * 300}", 1)], ids=["folder", "folder in a new one"]
)
def test_overlong_name_is_refused(place: Workplace, output: str, code: int) -> None:
    """The error of the system is reported before a model is read; no folder is left."""
    refuse(place, "-m", "out/model.onnx", "-o", output, code=code, words="too long")
    assert not (place.folder / "new").exists()


_INTERRUPTED = """
import dataclasses, signal, sys
from winml.modelkit.builds import build, stages as build_stages
from winml.modelkit.cli.main import main

def stop(task):
    signal.raise_signal(signal.SIGINT)

name = sys.argv.pop(1)
# As in a terminal: where the tests run in the background, their processes ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
stages = tuple(dataclasses.replace(stage, work=stop) if stage.name == name else stage for stage in build_stages.STAGES)
build.run_build.__kwdefaults__["stages"] = stages
main()
"""


@pytest.mark.parametrize(("stage", "words"), [("export", "no stage"), ("optimize", "completed: export;")])
def test_interrupted_build_lists_remaining_files(workplace: Workplace, bert_tiny: Path, stage: str, words: str) -> None:
    """An interruption before the first result leaves no file."""
    stopped = Workplace(workplace.root, (sys.executable, "-c", _INTERRUPTED, stage), is_warm=True)
    outcome = stopped.winml("build", "-m", bert_tiny, "-o", "new", *_FLAGS, "-q")
    assert (130 if sys.platform == "win32" else -signal.SIGINT) == outcome.code
    assert f"interrupted: {words}" in outcome.err
    assert (stage == "optimize") == (workplace.folder / "new" / "export.onnx").exists()


def test_place_that_cannot_be_written_is_refused(place: Workplace) -> None:
    """A file is in place of a folder."""
    refuse(place, "-m", "out/model.onnx", "-o", "out/model.onnx/new", code=1, words="cannot write")


def test_manifest_of_a_newer_version_is_ignored_with_a_note(place: Workplace) -> None:
    """The list of files in the manifest still tells which files may be replaced."""
    arguments = ("-m", "out/export.onnx", "-o", "new")
    assert 0 == place.winml("build", *arguments).code
    path = place.folder / "new" / "build_manifest.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**record, "manifest_version": 99, "extra": True}), encoding="utf-8")
    outcome = place.winml("build", *arguments)
    assert 0 == outcome.code, outcome.err
    assert "version 99" in outcome.out
    written = json.loads(path.read_text(encoding="utf-8"))
    assert {"run", "skipped"} == {stage["status"] for stage in written["parts"][0]["stages"]}
