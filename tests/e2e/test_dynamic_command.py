"""Commands on models with dynamic dimensions, and on dimensions that are fixed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from e2e.in_process import run_here
from e2e.workplace import Workplace


def block_libraries(libraries: tuple[str, ...], workplace: Workplace, folder: Path) -> Workplace:
    """Return the workplace with libraries that fail when they are imported."""
    traps = folder / "traps"
    traps.mkdir()
    for name in libraries:
        (traps / f"{name}.py").write_text(f"raise AssertionError('{name} is imported')\n", encoding="utf-8")
    return replace(workplace, variables={"PYTHONPATH": str(traps)})


@pytest.fixture(scope="module")
def dynamic(make_workplace: Callable[[], Workplace], bert_tiny: Path) -> tuple[Workplace, dict[str, object], list[str]]:
    """A workplace with ``dynamic.onnx``, the JSON of the export, and its messages."""
    workplace = make_workplace()
    done = workplace.export(
        "-m", bert_tiny, "-o", "dynamic.onnx", "--dynamic-batch", "--dynamic-sequence", "--format", "json"
    )  # fmt: skip
    assert 0 == done.code, done.err
    return workplace, json.loads(done.out), done.complaint


def shapes(path: Path) -> dict[str, list[int | str]]:
    """Return the shapes of the inputs in a file."""
    graph = onnx.load(path).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.input
    }


def test_dynamic_export_names_dimensions_without_warnings(
    dynamic: tuple[Workplace, dict[str, object], list[str]],
) -> None:
    """An intended dynamic export prints no warning, and its JSON lists every dimension with the compared sizes."""
    workplace, answer, complaint = dynamic
    assert [] == complaint
    assert {("batch_size", "sequence_length")} == {
        tuple(shape) for shape in shapes(workplace.folder / "dynamic.onnx").values()
    }
    assert [
        {"name": "batch_size", "min": 1, "example": 2, "checked": [1, 3, 17]},
        {"name": "sequence_length", "min": 1, "max": 512, "example": 128, "checked": [1, 145, 512]},
    ] == answer["dynamic"]


def test_dynamic_file_is_pinned_without_torch(
    dynamic: tuple[Workplace, dict[str, object], list[str]], tmp_path: Path
) -> None:
    """Sizes are fixed by name or key, without torch and transformers."""
    light = block_libraries(("torch", "transformers"), dynamic[0], tmp_path)
    sizes = '{"batch_size": 1, "sequence_length": 32}'
    done = light.export("-m", "dynamic.onnx", "-o", "static.onnx", "--shape-config", sizes, "--overwrite")
    assert 0 == done.code, done.err
    assert "pinned     batch_size 1, sequence_length 32" in done.out
    assert "equals dynamic.onnx" in done.out
    assert {(1, 32)} == {tuple(shape) for shape in shapes(light.folder / "static.onnx").values()}


def test_file_with_the_names_of_an_earlier_version_is_read_as_before(bert_tiny: Path, tmp_path: Path) -> None:
    """Version 0.2 named rows ``batch`` and tokens ``sequence``: every verb with sizes accepts both names of each."""
    older, newer, fixed = (str(tmp_path / f"{name}.onnx") for name in ("older", "newer", "fixed"))
    export = ("export", "-m", bert_tiny, "-q", "-o")
    assert 0 == run_here(*export, older, "--dynamic-axes", "input_ids:0=batch,1=sequence").code
    assert 0 == run_here(*export, newer, "--dynamic-batch", "--dynamic-seq-len").code
    assert {("batch", "sequence")} == set(map(tuple, shapes(Path(older)).values()))
    given = {older: '{"batch_size": 3, "sequence_length": 9}', newer: '{"batch": 3, "sequence": 9}'}
    for path, sizes in given.items():
        assert 0 == run_here("export", "-m", path, "-o", fixed, "--shape-config", sizes, "-q", "--overwrite").code
        assert {(3, 9)} == set(map(tuple, shapes(Path(fixed)).values()))
        times = ("perf", path, "--iterations", "2", "--warmup", "0", "--format", "json")
        measured = json.loads(run_here(*times, "--batch-size", "3").out)
        assert [[3, 128]] * 3 == list(measured["model_info"]["measured_shapes"].values())
        assert 3 == measured["benchmark_info"]["batch_size"]
    for pair in ((older, newer), (newer, older)):
        assert 0 == run_here("compare", *pair, "--shape-config", '{"batch": 2, "sequence_length": 9}').code


REFUSALS = {
    "a negative axis": (("--dynamic-axes", "input_ids:-1=n"), ("--dynamic-axes", "axis -1 is negative")),
    "an axis with two names": (("--dynamic-axes", "x:0=a x:0=b"), ("named both 'a' and 'b'",)),
    "a provider that needs fixed sizes": (
        ("--dynamic-batch", "--ep", "qnn"),
        ("--ep qnn", "QNNExecutionProvider", "--allow-dynamic"),
    ),
    "a name in a shape for such a provider": (
        ("--shape-config", '{"sequence_length": "s"}', "--ep", "qnn"),
        ("--ep qnn", "QNNExecutionProvider", "--allow-dynamic"),
    ),
    "a provider nobody knows": (("--ep", "qnm"), ("no such execution provider", "Did you mean 'qnn'")),
    "an example that is no example": (
        ("--shape-config", '{"sequence_length": {"example": 1}}'),
        ("sequence_length", "traced as a constant"),
    ),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSALS.values(), ids=list(REFUSALS))
def test_wrong_dynamic_request_is_refused_before_torch(
    arguments: tuple[str, ...], words: tuple[str, ...], workplace: Workplace, bert_tiny: Path, tmp_path: Path
) -> None:
    """A request that is wrong in itself is refused at once, with exit code 2."""
    light = block_libraries(("torch", "transformers", "onnx", "onnx_ir", "onnxruntime"), workplace, tmp_path)
    done = light.export("-m", bert_tiny, "-o", "model.onnx", *arguments)
    assert 2 == done.code, done.err
    for word in words:
        assert word in done.err


def test_options_about_pytorch_are_refused_for_an_onnx_file(workplace: Workplace, tmp_path: Path) -> None:
    """Only sizes of a graph can be changed."""
    (workplace.folder / "model.onnx").write_bytes(b"")
    light = block_libraries(("torch", "onnx"), workplace, tmp_path)
    done = light.export("-m", "model.onnx", "-o", "static.onnx", "--batch-size", "1", "--dynamic-batch")
    assert 2 == done.code
    assert "--dynamic-batch" in done.err
