"""The array types that functions of every room take and return.

Standard library only: numpy is named for type checkers, and imported by whoever makes an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
"""A numpy array of any data type and shape."""
Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"
"""Arrays by the name of an input or output."""
