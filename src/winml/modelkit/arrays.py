"""Array types that functions of every subpackage take and return.

Standard library only: numpy is named for type checkers, and imported when an array or a data type is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
"""A numpy array of any data type and shape."""
Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"
"""Arrays by the name of an input or output."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the data type of numpy or ``ml_dtypes`` with a name such as ``float32`` or ``bfloat16``."""
    import ml_dtypes
    import numpy as np

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    return dtype
