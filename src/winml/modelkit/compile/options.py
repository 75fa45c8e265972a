"""Validated record of the compile options declared in ``declared_options.py``."""

from __future__ import annotations

from winml.modelkit.compile.declared_options import CompileFields
from winml.modelkit.options import Options


class CompileOptions(CompileFields, Options):
    """Target and limits of a compilation."""
