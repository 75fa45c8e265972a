"""The peak memory of a block, without the memory used before it."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from winml.modelkit.ort.host import PeakMemory, peak_bytes, resident_bytes

SIZE = 200_000_000


def take_and_free() -> None:
    """Hold memory long enough for a sample."""
    block = np.ones(SIZE, dtype=np.uint8)
    time.sleep(0.3)
    del block


def test_peak_memory_includes_freed_memory() -> None:
    """The process's own maximum does not rise in the second round, so samples must find the peak."""
    for _ in range(2):
        before = resident_bytes()
        with PeakMemory() as memory:
            take_and_free()
        assert memory.largest_bytes >= before + SIZE * 0.9


def test_peak_memory_of_a_quiet_block_excludes_earlier_blocks() -> None:
    """The process's own maximum is that of an earlier block."""
    take_and_free()
    with PeakMemory() as memory:
        pass
    assert memory.largest_bytes < resident_bytes() + SIZE * 0.5


def test_peak_of_a_process_excludes_the_process_that_started_it() -> None:
    """A program started by one that holds 600 MB needs no such memory."""
    held = bytearray(600_000_000)
    held[::4096] = b"x" * len(held[::4096])
    code = "from winml.modelkit.ort.host import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert peak_bytes() > len(held)
    # Python with the modules that it imports takes about 20 MB.
    assert 0 < int(done.stdout) < 300_000_000
