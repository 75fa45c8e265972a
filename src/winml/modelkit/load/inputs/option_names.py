"""How are the options spelled that describe inputs? For messages; imports nothing."""

from __future__ import annotations

__all__ = ["INPUT_SPECS_OPTION", "SHAPE_CONFIG_OPTION"]

SHAPE_CONFIG_OPTION = "--shape-config"
INPUT_SPECS_OPTION = "--input-specs"
