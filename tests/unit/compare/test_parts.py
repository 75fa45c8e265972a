"""Comparison of models of several parts, part by part: the worst of all, and each part by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import save_file

from e2e.in_process import run_here
from two_parts import export_loaded, two_parts
from winml.modelkit import CompareOptions, HTPExporter, WinMLExportConfig, compare_models
from winml.modelkit.builds.compared_models import resolve_pairs
from winml.modelkit.errors import UsageError
from winml.modelkit.ort.opened_model import RunOptions


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An export of two parts, and a copy of it with a wrong layer in the decoder."""
    folder: Path = tmp_path_factory.mktemp("parts")
    export_loaded(HTPExporter(WinMLExportConfig(verify=False)), two_parts(), folder / "right" / "net.onnx")
    shutil.copytree(folder / "right", folder / "wrong")
    model = onnx.load(folder / "wrong" / "net_decoder.onnx")
    weight = next(item for item in model.graph.initializer if list(item.dims) == [8, 8])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 2, weight.name))
    onnx.save(model, folder / "wrong" / "net_decoder.onnx")
    return folder / "right", folder / "wrong"


def test_wrong_part_is_the_worst_and_names_its_module(folders: tuple[Path, Path]) -> None:
    """Each output names its part; the other part is equal."""
    right, wrong = folders
    result = compare_models(right, wrong, by_module=True, threshold=0.01)
    assert ["encoder", "decoder"] == list(result.parts)
    assert [("encoder", "states"), ("decoder", "logits")] == [
        (item.part, item.fidelity.name) for item in result.outputs
    ]
    assert "decoder" == result.worst.part
    assert not result.is_within
    assert result.parts["encoder"].is_within
    assert result.parts["encoder"].first_divergence is None
    assert result.first_divergence is not None
    assert result.first_divergence.identity.module.startswith("body.decoder.block")
    record = json.loads(json.dumps(result.as_record()))
    assert ["encoder", "decoder"] == [output["part"] for output in record["outputs"]]
    assert record["parts"]["decoder"]["first_divergence"] == record["first_divergence"]


@pytest.mark.parametrize("candidate", ["wrong", "wrong/net_decoder.onnx"])
def test_submodel_and_the_file_of_a_part_narrow(folders: tuple[Path, Path], candidate: str) -> None:
    """One part is compared as two files are; a file is compared with the part that its metadata names."""
    right = folders[0]
    chosen = ("decoder",) if candidate == "wrong" else ()
    result = compare_models(right, right.parent / candidate, submodel=chosen)
    assert not result.parts
    assert str(right / "net_decoder.onnx") == result.reference
    assert result.worst.fidelity.relative_error > 0.01


def test_size_counts_in_the_parts_with_that_size(tmp_path: Path) -> None:
    """A size that no part has is refused with the sizes of the parts."""
    for side in ("a", "b"):
        for part, shape in (("encoder", "N"), ("decoder", "N, T")):
            text = json.dumps({"name": part, "of": ["encoder", "decoder"], "feeds": []}).replace('"', '\\"')
            model = onnx.parser.parse_model(f"""
                <ir_version: 8, opset_import: ["" : 17], metadata_props: ["winml.part": "{text}"]>
                g (float[{shape}] x) => (float[{shape}] y) {{ y = Neg (x) }}""")
            (tmp_path / side).mkdir(exist_ok=True)
            onnx.save(model, tmp_path / side / f"{part}.onnx")

    def compared(sizes: dict[str, int]) -> Any:
        options = CompareOptions(RunOptions("b", sizes=sizes))
        return compare_models(tmp_path / "a", tmp_path / "b", options)

    assert compared({"N": 3, "T": 2}).is_within
    with pytest.raises(UsageError, match="'S'") as raised:
        compared({"N": 3, "T": 2, "S": 2})
    assert "T (x:1)" in raised.value.hint


def test_pages_of_modules_are_written_for_each_part(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Pages are named after the parts, the result is one file, and existing files are refused."""
    right, wrong = map(str, folders)
    page, answer = str(tmp_path / "where.html"), str(tmp_path / "where.json")
    command = ("compare", right, wrong, "--by-module", "--report", page, "-o", answer)
    outcome = run_here(*command)
    assert 0 == outcome.code, outcome.err
    assert {"where.json", "where_encoder.html", "where_decoder.html"} == {path.name for path in tmp_path.iterdir()}
    assert "logits of decoder" in outcome.out
    assert "\nencoder\n" in outcome.out
    assert 2 == run_here(*command).code
    assert 3 == run_here("compare", right, wrong, "--threshold", "0.01").code
    # Pages of a single selected part have the plain names.
    one = run_here("compare", right, wrong, "--submodel", "decoder", "--by-module", "--node-data", f"{tmp_path}/n.json")
    assert 0 == one.code, one.err
    assert (tmp_path / "n.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--submodel", "decode"), "--submodel decode: {right} has no such part"),
        (("--step", "2"), "--step applies to one graph, but several are compared: encoder, decoder"),
        (("--map", "a=b"), "--map applies to one graph"),
    ],
)
def test_inputs_of_one_graph_only_are_refused(
    folders: tuple[Path, Path], arguments: tuple[str, ...], message: str
) -> None:
    """The options are refused before a file is opened, with the option that selects a part."""
    right, wrong = map(str, folders)
    outcome = run_here("compare", right, wrong, *arguments)
    assert 2 == outcome.code
    assert message.format(right=right) in outcome.err


def test_sides_that_do_not_match_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A graph without a part needs the name of one; a part of another model is on one side only."""
    right = folders[0]
    whole = onnx.load(right / "net_decoder.onnx")
    del whole.metadata_props[:]
    onnx.save(whole, tmp_path / "whole.onnx")
    names = (str(right), str(tmp_path / "whole.onnx"))
    with pytest.raises(UsageError, match=r"one graph.*encoder, decoder"):
        resolve_pairs(*names)
    assert ["decoder"] == list(resolve_pairs(*names, ["decoder"]).parts)
    with pytest.raises(UsageError, match="--submodel encoder: neither"):
        resolve_pairs(names[1], names[1], ["encoder"])
    with pytest.raises(UsageError, match="both models"):
        resolve_pairs(str(right), str(right / "net_decoder.onnx"), ["encoder"])


def test_export_in_the_folder_of_its_checkpoint_leaves_the_checkpoint_meant(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The weights of the checkpoint are the model; the ONNX files beside them may be old."""
    shutil.copytree(folders[0], tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "config.json").write_text('{"model_type": "bert"}')
    save_file({"weight": np.zeros(1, np.float32)}, tmp_path / "checkpoint" / "model.safetensors")
    pairs = resolve_pairs(str(tmp_path / "checkpoint"), str(tmp_path / "checkpoint" / "net_decoder.onnx"))
    assert ["model"] == list(pairs.parts)
