"""What is a graph compiled for? The validated record of the options that ``declared_options.py`` declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from winml.modelkit.compile.declared_options import CompileFields
from winml.modelkit.options import Options, record_of

if TYPE_CHECKING:

    class _Fields(CompileFields, Options):
        pass
else:
    _Fields = record_of(CompileFields)


class CompileOptions(_Fields):
    """What a graph is compiled for."""
