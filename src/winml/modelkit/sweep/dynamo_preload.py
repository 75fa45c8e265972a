"""Imports all modules that an export with dynamo imports late.

Imported only by the server that cells are forked from.
"""

from __future__ import annotations

from winml.modelkit.export.dynamo.transformers_patches import import_exporters

import_exporters()
