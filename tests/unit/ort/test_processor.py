"""Instructions of the processor for 8-bit integers."""

from __future__ import annotations

import sys

import pytest

from winml.modelkit.ort.host import flags_have_dot_products, is_x86, products_are_summed_exactly, read_cpuinfo


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\nmodel name\t: with avx512_vnni in its name\n", None),
        ("", None),
    ],
)
def test_dot_products_are_read_from_the_flags(cpuinfo: str, expected: bool | None) -> None:
    """The flags are VNNI of AVX-512 or AVX2, or the dot product of Arm; without flags the result is None."""
    assert flags_have_dot_products(cpuinfo) is expected


def test_probed_sums_agree_with_the_flags() -> None:
    """ONNX Runtime sums products of bytes exactly where Linux lists VNNI; on Windows only the sums can tell."""
    listed = flags_have_dot_products(read_cpuinfo())
    if sys.platform != "linux" or listed is None or not is_x86():
        pytest.skip("the system lists no x86 flags")
    assert products_are_summed_exactly() is listed
