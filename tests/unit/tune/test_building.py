"""Building the candidates of a tuning."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.tune.building import CandidateBuilds, tuned_model
from winml.modelkit.tune.records import Candidate

OPEN = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[batch, width] x) => (float[batch, width] y) <float[1] one = {1.0}> { y = Add(x, one) }
"""


def input_shape(path: Path) -> list[int | str]:
    """Return the sizes and names of the first input."""
    dimensions = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    return [size.dim_param or size.dim_value for size in dimensions]


@pytest.mark.parametrize(("sizes", "shape"), [({}, ["batch", "width"]), ({"batch": 2, "width": 3}, [2, 3])])
def test_sizes_are_fixed_in_the_file_of_a_fixed_candidate(
    tmp_path: Path, sizes: dict[str, int], shape: list[int | str]
) -> None:
    """The file that was given stays open, and the winner's config starts from the fixed one, which stays."""
    source = tmp_path / "open.onnx"
    onnx.save(onnx.parser.parse_model(OPEN), source)
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = tmp_path / "tuned"
    folder.mkdir()
    builds = CandidateBuilds(tuned_model(ModelRequest(model=str(source)), WinMLExportConfig()), folder)
    built = builds.build(Candidate("plain+fixed", "fixed", "", fixed_sizes=sizes))
    assert shape == input_shape(built.model_path)
    assert ["batch", "width"] == input_shape(source)
    assert bool(sizes) == (folder / "exported" / "fixed.onnx").is_file()
    assert (built.folder / "tokenizer.json").is_file(), "the tokenizer beside the model goes with every candidate"
