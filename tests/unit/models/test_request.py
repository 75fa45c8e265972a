"""Recognition of the source named by ``-m``, without heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from winml.modelkit.errors import CheckpointError, ModelPathError, UsageError, WinMLError
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.request import ModelRequest, resolve_source


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a source of every kind."""
    monkeypatch.chdir(tmp_path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(4)
    for name in ("whole", "cut", "bare", "adapter", "outer/inner", "foreign", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("whole", "cut", "bare", "outer/inner", "foreign"):
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "whole" / "model.safetensors").write_bytes(whole)
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:-1])
    (tmp_path / "foreign" / "tf_model.h5").write_bytes(b"")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "make.py").write_text("", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    return tmp_path


def _kind(model: str, **others: object) -> tuple[str, str | None]:
    source = resolve_source(ModelRequest(model, **others))  # type: ignore[arg-type]
    return source.kind, source.factory


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("whole", ("folder", None)),
        ("./whole/", ("folder", None)),
        ("make.py:build", ("script", "build")),
        ("make.py:Nested.build", ("script", "Nested.build")),
        ("package.module:build", ("script", "build")),
        ("module:build", ("script", "build")),
        ("bert-base-uncased", ("hub", None)),
        ("sentence-transformers/all-MiniLM-L6-v2", ("hub", None)),
        ("owner/name.with_dots-1.5", ("hub", None)),
    ],
)
def test_source_kind_follows_from_name_and_disk(place: Path, model: str, expected: tuple[str, str | None]) -> None:
    """An existing name is a path, a name with a factory is a script, and other names with a slash are Hub ids."""
    assert expected == _kind(model)


def test_source_config_and_bare_folder_need_random_weights(place: Path) -> None:
    """The config is enough to build a model with random weights."""
    assert ("config", None) == _kind("bare/config.json", random_weights=True)
    assert ("folder", None) == _kind("bare", random_weights=True)
    assert resolve_source(ModelRequest("whole", random_weights=True)).weights is None


def test_source_absolute_path_of_script_is_preserved(place: Path) -> None:
    """The last colon separates the factory."""
    source = resolve_source(ModelRequest(f"{place / 'make.py'}:build"))
    assert (place / "make.py", "build") == (source.path, source.factory)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("/no/such/folder", ModelPathError, "no such"),
        ("./wole", ModelPathError, "whole"),
        ("a/b/c", ModelPathError, "exist either"),
        ("missing.json", ModelPathError, "no such"),
        ("C:\\models\\bert", ModelPathError, "no such"),
        ("C:/models/bert", ModelPathError, "no such"),
        ("C:\\models\\make.py:build", ModelPathError, r"C:\models\make.py:"),
        ("missing.py:build", ModelPathError, "missing.py:"),
        ("make.py", UsageError, "make.py:NAME_OF_THE_FUNCTION"),
        ("model.onnx", UsageError, "ONNX file"),
        ("bare/config.json", UsageError, "--random-weights"),
        ("bare", ModelPathError, "--random-weights"),
        ("foreign", ModelPathError, "tf_model.h5"),
        ("empty", ModelPathError, "has no config.json"),
        ("outer", ModelPathError, "inner"),
        ("adapter", ModelPathError, "adapter"),
        ("notes.txt", ModelPathError, "not a model"),
        ("whole/model.safetensors", ModelPathError, "weights file"),
        ("two words", ModelPathError, "Hub id"),
        (" ", UsageError, "model name"),
    ],
)
def test_source_unusable_name_is_refused(place: Path, model: str, error: type[WinMLError], words: str) -> None:
    """Each wrong name has its own sentence, exit code 2 and a next step."""
    with pytest.raises(error) as caught:
        resolve_source(ModelRequest(model))
    assert words in str(caught.value)
    assert caught.value.hint
    assert 2 == caught.value.exit_code


def test_source_truncated_weights_are_refused_at_once(place: Path) -> None:
    """A damaged file is the material's fault: exit code 1."""
    with pytest.raises(CheckpointError, match="'w'") as caught:
        resolve_source(ModelRequest("cut"))
    assert 1 == caught.value.exit_code


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ModelRequest("whole", revision="main"), "--revision main"),
        (ModelRequest("make.py:build", random_weights=True), "--random-weights"),
        (ModelRequest("make.py:build", task="fill-mask"), "--task fill-mask"),
        (ModelRequest("whole", task="fill-maks"), "--task fill-maks"),
        (ModelRequest("make.py:build", batch_size=2), "--batch-size"),
        (ModelRequest("make.py:build", shape_config=ShapeConfig(height=2)), "--shape-config"),
        (ModelRequest("whole", batch_size=2, shape_config=ShapeConfig(batch_size=3)), "--batch-size 2"),
    ],
)
def test_source_flag_without_meaning_is_refused(place: Path, request_: ModelRequest, words: str) -> None:
    """A flag that could only be ignored is an error."""
    with pytest.raises(UsageError) as caught:
        resolve_source(request_)
    assert words in caught.value.message


def test_source_resolving_imports_no_heavy_library(place: Path) -> None:
    """The error for a wrong path does not wait for the import of torch."""
    program = (
        "import sys\n"
        "from winml.modelkit.errors import ModelPathError\n"
        "from winml.modelkit.models.request import ModelRequest, resolve_source\n"
        "resolve_source(ModelRequest('whole')), resolve_source(ModelRequest('owner/name'))\n"
        "try: resolve_source(ModelRequest('./missing'))\n"
        "except ModelPathError: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'onnx', 'onnx_ir', 'onnxruntime'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "" == done.stderr
