"""Document of a build."""

from __future__ import annotations

from collections.abc import Sequence

from winml.modelkit.builds.manifest_records import BuildResult, build_lines
from winml.modelkit.report.document import Document, Fields


def build_document(result: BuildResult, next_command: str = "", usage: Sequence[str] = ()) -> Document:
    """Return the document of a build.

    Args:
        result: The build.
        next_command: Command that runs the built model; empty: none is shown.
        usage: Lines of code that open the folder in the runtime of its layout.
    """
    commands = [("next", next_command)] if next_command else []
    # One label, so that the lines can be copied together.
    code = [("" if number else "use", line) for number, line in enumerate(usage)]
    return Document([Fields([*build_lines(result), *commands, *code])])
