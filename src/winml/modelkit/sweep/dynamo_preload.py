"""What does an export with dynamo import? All of it is, with this module: only the server that cells fork from does so."""

from __future__ import annotations

from winml.modelkit.export.dynamo.transformers_patches import import_repaired_models

__all__: list[str] = []

import_repaired_models()
