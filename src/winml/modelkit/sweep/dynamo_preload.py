"""What does an export with dynamo import late? With this module, all of it is imported.

Only the server that cells are forked from imports it.
"""

from __future__ import annotations

from winml.modelkit.export.dynamo.transformers_patches import import_exporters

import_exporters()
