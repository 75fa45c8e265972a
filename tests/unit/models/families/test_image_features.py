"""Image projectors, found by running a model on shapes with more than one image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, Lfm2VlModel

from winml.modelkit.models.families.image_features import find_image_code
from winml.modelkit.onnx.specs import InputTensorSpec

pytestmark = pytest.mark.usefixtures("libraries_may_warn")

_SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_SPECS = (
    InputTensorSpec(name="input_ids", shape=(1, 8), dtype="int64", value_range=(4, 60), first_values=((3, 4),)),
    InputTensorSpec(name="attention_mask", shape=(1, 8), dtype="int64", value_range=(1, 1)),
    InputTensorSpec(name="pixel_values", shape=(1, 16, 48), dtype="float32"),
    InputTensorSpec(name="spatial_shapes", shape=(1, 2), dtype="int64", value_range=(4, 4)),
    InputTensorSpec(name="pixel_attention_mask", shape=(1, 16), dtype="int64", value_range=(1, 1)),
)


def features_image_by_image(self: Any, pixel_values: Any, spatial_shapes: Any, pixel_attention_mask: Any) -> Any:
    """Return image vectors as transformers before 5.24: one run of the projector for each image."""
    shapes, mask = spatial_shapes, pixel_attention_mask
    seen = self.vision_tower(pixel_values=pixel_values, spatial_shapes=shapes, pixel_attention_mask=mask)
    features = []
    for image, shape, length in zip(seen.last_hidden_state, shapes, mask.sum(dim=1), strict=True):
        vectors = self.multi_modal_projector(image[:length].reshape(1, shape[0], shape[1], -1))
        features.append(vectors.reshape(-1, vectors.size(-1)))
    seen.pooler_output = features
    return seen


def test_projector_run_once_per_image_is_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a projector passes with one image; with two, only the vectors of the last would remain."""
    monkeypatch.setattr(Lfm2VlModel, "get_image_features", features_image_by_image)
    config = Lfm2VlConfig(
        vision_config={
            **_SIZES, "model_type": "siglip2_vision_model", "num_hidden_layers": 1, "patch_size": 4, "num_patches": 16,
        },
        text_config={
            **_SIZES, "model_type": "lfm2", "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64,
            "layer_types": ["conv", "full_attention"],
        },
        image_token_id=3,
        downsample_factor=2,
        projector_hidden_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = Lfm2VlForConditionalGeneration(config).eval()
    code = find_image_code(model, {spec.name: spec for spec in _SPECS})
    assert "Lfm2VlForConditionalGeneration" in str(code)
