"""Instructions of the processor for 8-bit integers."""

from __future__ import annotations

import pytest

from winml.modelkit.ort.host import flags_have_dot_products


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
