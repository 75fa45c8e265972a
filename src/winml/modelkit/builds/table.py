"""Document of a build."""

from __future__ import annotations

from winml.modelkit.builds.manifest_records import BuildResult, build_lines
from winml.modelkit.report.document import Document, Fields


def build_document(result: BuildResult, next_command: str = "") -> Document:
    """Return the document of a build.

    Args:
        result: The build.
        next_command: Command that runs the built model; empty: none is shown.
    """
    return Document([Fields([*build_lines(result), *([("next", next_command)] if next_command else [])])])
