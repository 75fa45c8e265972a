"""Attribution of a kernel fused from several modules."""

from __future__ import annotations

import pytest

from winml.modelkit.profile.module_profile import NodeWork, working_module

SUM, PRODUCT = NodeWork("/M", 0, 100), NodeWork("/M/A", 900, 100)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([PRODUCT, SUM, SUM, SUM], "/M/A"),
        ([NodeWork("/M/A", None, None), SUM], "/M/A"),
        ([PRODUCT, NodeWork("/M/B", 901, 1)], "/M/B"),
        ([PRODUCT, NodeWork("/M/B", 450, 1), NodeWork("/M/B", 451, 1)], "/M/B"),
        ([PRODUCT, NodeWork("/M/B", 900, 1)], None),
        ([PRODUCT, NodeWork("/M/B", None, 1)], None),
        ([SUM, NodeWork("/M/B", 0, 99)], "/M"),
        ([SUM, NodeWork("/M/B", 0, 100)], None),
        ([SUM, NodeWork("/M/B", 0, None)], None),
        ([], None),
    ],
)
def test_working_module_has_the_most_operations(nodes: list[NodeWork], expected: str | None) -> None:
    """Multiply-accumulate operations decide, else the number of values; no module is chosen in a near tie."""
    assert expected == working_module(nodes)
    assert expected == working_module(nodes[::-1])
