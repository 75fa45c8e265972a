"""The modalities, in the order in which they are decided."""

from __future__ import annotations

from collections.abc import Mapping

from winml.modelkit.models.inputs.modalities.audio import AudioFeatures, AudioSamples
from winml.modelkit.models.inputs.modalities.image import Image
from winml.modelkit.models.inputs.modalities.modality import BATCH_KEY, Modality, ShapeKey
from winml.modelkit.models.inputs.modalities.text import Text

MODALITIES: tuple[Modality, ...] = (
    Text(),
    # Before audio: in a model of both, the placeholder tokens of the image come first in a row of text.
    Image(),
    AudioFeatures(),
    AudioSamples(),
)

SHAPE_KEYS: Mapping[str, ShapeKey] = {
    key.name: key for key in (BATCH_KEY, *(key for modality in MODALITIES for key in modality.shape_keys))
}
"""Name → key of ``--shape-config``."""
