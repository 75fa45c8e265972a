"""Two parts of a model that finds the masks of points."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import save_sam
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import OpenSize

pytestmark = pytest.mark.usefixtures("libraries_may_warn")


def test_numbers_of_points_are_dynamic_unless_the_user_fixes_them(tmp_path: Path) -> None:
    """Bounds and names of the user are those of the dimensions."""
    save_sam(tmp_path / "sam")
    points = {}
    for name, sizes in {
        "default": {},
        "fixed": {"point_batch_size": 4, "nb_points_per_image": 1},
        "bounded": {"point_batch_size": OpenSize(max=64, name="objects"), "nb_points_per_image": 1},
    }.items():
        request = ModelRequest(str(tmp_path / "sam"), task="mask-generation", shape_config=ShapeConfig(**sizes))
        encoder, decoder = load_model(request).parts
        assert ["vision_encoder", "prompt_encoder_mask_decoder"] == [encoder.name, decoder.name]
        assert [spec.name for spec in decoder.inputs][2:] == [feed.input for feed in encoder.feeds]
        dimensions = {dimension.name: dimension.max for dimension in decoder.dimensions}
        points[name] = (decoder.inputs[0].shape, dimensions, [*decoder.open_by_default])
    keys = ["point_batch_size", "nb_points_per_image"]
    assert points == {
        "default": ((1, *keys, 2), dict.fromkeys(keys), keys),
        "fixed": ((1, 4, 1, 2), {}, []),
        "bounded": ((1, "objects", 1, 2), {"objects": 64}, []),
    }
