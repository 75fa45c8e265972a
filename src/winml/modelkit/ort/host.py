"""Name of the processor, and present and peak resident memory of this process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import sys
import threading
from pathlib import Path

import psutil


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes."""
    return int(psutil.Process().memory_info().rss)


def return_freed_memory() -> None:
    """Return freed memory to the system, which the C library otherwise keeps; only glibc can."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes() -> int:
    """Return the largest resident memory since the program of the process started, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # `ru_maxrss` includes the memory of the process that started this one.
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    import resource

    # Specified by the systems: kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int:
    """Return the number of bytes the process may still allocate.

    On macOS, the total memory: the system does not count reclaimable memory as available.
    """
    memory = psutil.virtual_memory()
    if not sys.platform.startswith(("linux", "win32")):
        return int(memory.total)
    limit = _container_available()
    return int(memory.available) if limit is None else min(int(memory.available), limit)


def _container_available(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the number of bytes available in a container; `None` without a limit. Cached files count as free."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used_bytes = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = next((int(line.split()[1]) for line in statistics if line.startswith("file ")), 0)
    return max(0, int(limit) - used_bytes + cached)


_SAMPLING_SECONDS = 0.05
"""Chosen: detects allocations that last as long as copying some hundred megabytes, at well below 1 % of one core."""


class PeakMemory:
    """Measures the peak memory of a ``with`` block, including mapped weight files.

    The system reports the peak since the process started. If this value rises inside the block it is exact; if an
    earlier peak was higher, the block is sampled.

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

    def __exit__(self, *_error: object) -> None:
        """Set :attr:`largest_bytes`."""
        self._stop.set()
        self._thread.join()
        mark = peak_bytes()
        self.largest_bytes = mark if mark > self._mark_before else max(self._sampled_bytes, resident_bytes())

    def _sample_memory(self) -> None:
        while not self._stop.wait(_SAMPLING_SECONDS):
            self._sampled_bytes = max(self._sampled_bytes, resident_bytes())


_WIDE_FLAGS = ("avx512f", "avx2", "avx", "asimd")
"""Specified: how Linux calls instructions whose registers decide the layouts of ONNX Runtime's CPU kernels."""

_DOT_PRODUCT_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})
"""Specified: how Linux calls VNNI of AVX-512 and of AVX2, and the dot product of Arm, in ``/proc/cpuinfo``."""


def has_integer_dot_products() -> bool | None:
    """Return True if the processor has instructions for 8-bit dot products (VNNI, Arm dot product); None: unknown."""
    system = platform.system()
    if system == "Linux":
        return flags_have_dot_products(read_cpuinfo())
    if is_x86():
        # Neither Windows nor macOS has a name for VNNI. NumPy knows that of AVX-512, and not that of AVX2.
        return _has_wide_dot_products() or products_are_summed_exactly()
    if sys.platform == "win32":
        import ctypes

        return bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(_WINDOWS_ARM_DOT_PRODUCTS))
    return True if system == "Darwin" else None  # every processor of Apple's own has them


def _has_wide_dot_products() -> bool:
    """Return True if NumPy found VNNI of AVX-512; ``numpy.show_runtime`` prints the same table."""
    features = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    return bool(features.get("AVX512VNNI"))


_WINDOWS_ARM_DOT_PRODUCTS = 43
"""Specified: ``PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE`` of Windows' ``winnt.h``."""
_PROBED_LENGTH = 64
"""Chosen: products in a probed sum; the kernels add them in groups of at most 64."""


@functools.cache
def products_are_summed_exactly() -> bool:
    """Return True if ONNX Runtime's CPU kernels sum products of unsigned and signed bytes exactly.

    Without 8-bit dot products (VNNI), sums of two products on x86 saturate at 16 bits (documented by ONNX Runtime). The
    largest possible products are summed, in about a millisecond.
    """
    import numpy as np
    import onnx
    import onnxruntime as ort

    weight = np.full((_PROBED_LENGTH, 16), 127, np.int8)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "probe",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, _PROBED_LENGTH])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [1, 16])],
        [onnx.helper.make_tensor("w", onnx.TensorProto.INT8, weight.shape, weight.tobytes(), raw=True)],
    )
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 13)])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (sums,) = session.run(None, {"x": np.full((1, _PROBED_LENGTH), 255, np.uint8)})
    return bool((sums == 255 * 127 * _PROBED_LENGTH).all())


def flags_have_dot_products(cpuinfo: str) -> bool | None:
    """Return True if ``/proc/cpuinfo`` lists dot product instructions; None if it lists no flags."""
    flags = _parse_flags(cpuinfo)
    return None if flags is None else not _DOT_PRODUCT_FLAGS.isdisjoint(flags)


def _parse_flags(cpuinfo: str) -> frozenset[str] | None:
    """Return the flags of the first processor; None if none are listed."""
    flags = _cpuinfo_value(cpuinfo, "flags", "Features")
    return None if flags is None else frozenset(flags.split())


def _cpuinfo_value(cpuinfo: str, *keys: str) -> str | None:
    """Return the value of the first line of ``/proc/cpuinfo`` with one of the keys; None without such a line."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value for key, _, value in lines if key.strip() in keys), None)


def read_cpuinfo() -> str:
    """Return the text of ``/proc/cpuinfo``; ``""`` if it cannot be read."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def instruction_sets() -> str:
    """Return the architecture and, if known, the widest vector instructions: ``x86_64 avx512f``."""
    flags = _parse_flags(read_cpuinfo()) if platform.system() == "Linux" else None
    widest = next((flag for flag in _WIDE_FLAGS if flags is not None and flag in flags), "")
    return f"{platform.machine()} {widest}".strip()


def is_x86() -> bool:
    """Return True if the processor is one of Intel's or AMD's kind."""
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "x86")


@functools.cache
def saturates_integer_sums() -> bool:
    """Return True if sums of unsigned times signed bytes saturate in ONNX Runtime's kernels on this processor."""
    return is_x86() and has_integer_dot_products() is False


def available_cores() -> int:
    """Return the number of cores this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


def processor_name() -> str:
    """Return the model name of the processor, or its architecture."""
    name = ""
    if sys.platform == "linux":
        name = _cpuinfo_value(read_cpuinfo(), "model name") or ""  # Arm kernels report none, only vendor numbers
    elif sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
    return " ".join((name or platform.processor() or platform.machine()).split())


def other_processor_seconds() -> float:
    """Return the processor time that everything but this process has used since the system started, in seconds."""
    used, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(used.get(name, 0.0) for name in busy) - own.user - own.system)
