"""What is a graph compiled for? The validated record of the options that ``declared_options.py`` declares."""

from __future__ import annotations

from winml.modelkit.compile.declared_options import CompileFields
from winml.modelkit.options import Options


class CompileOptions(CompileFields, Options):
    """What a graph is compiled for."""
