"""Measures the largest resident memory of this process inside a ``with`` block, mapped weight files included.

The system reports the largest value since the process started. Where that value rises inside the block it is exact;
where an earlier peak was higher, the block is sampled.
"""

from __future__ import annotations

import threading
from types import TracebackType

from winml.modelkit.runtime.memory import peak_bytes, resident_bytes

__all__ = ["PeakMemory"]

_SAMPLING_SECONDS = 0.05
"""Chosen: catches allocations that last as long as copying some hundred megabytes, at well below 1 % of one core."""


class PeakMemory:
    """Measures the peak memory of a ``with`` block.

    Attributes:
        largest_bytes: Largest resident memory inside the block; 0 until the block ends.
    """

    def __init__(self) -> None:
        """Prepare the measurement; it starts with the block."""
        self.largest_bytes = 0
        self._mark_before = 0
        self._sampled_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_memory, name="peak memory", daemon=True)

    def __enter__(self) -> PeakMemory:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Record the present values and start sampling."""
        self._mark_before = peak_bytes()
        self._sampled_bytes = resident_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Set :attr:`largest_bytes`."""
        self._stop.set()
        self._thread.join()
        mark = peak_bytes()
        self.largest_bytes = mark if mark > self._mark_before else max(self._sampled_bytes, resident_bytes())

    def _sample_memory(self) -> None:
        while not self._stop.wait(_SAMPLING_SECONDS):
            self._sampled_bytes = max(self._sampled_bytes, resident_bytes())
