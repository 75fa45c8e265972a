"""Choice of sizes for tracing, so that no dimension becomes a constant."""

from __future__ import annotations

from winml.modelkit.models.inputs.sizes import SizeWish, choose_trace_sizes


def test_trace_size_of_one_is_raised_to_two() -> None:
    """A size of 1 is traced as a constant, even if the user asks for it."""
    assert {"batch": 2} == choose_trace_sizes([SizeWish("batch", 1)])
    assert {"rows": 2} == choose_trace_sizes([SizeWish("rows", 1, is_firm=True)])


def test_trace_sizes_of_two_dimensions_differ() -> None:
    """Equal wishes give distinct sizes, images in steps a network divides by."""
    assert {"height": 224, "width": 192} == choose_trace_sizes(
        [SizeWish("height", 224, step=32), SizeWish("width", 224, step=32)]
    )


def test_trace_size_makes_way_for_firm_and_fixed_sizes() -> None:
    """A size fixed by the user stays; other sizes differ from the fixed size and from neighbouring sizes."""
    wishes = [
        SizeWish("sequence", 16, beside=frozenset({15, 14})),
        SizeWish("tokens", 16, is_firm=True),
    ]
    assert {"sequence": 13, "tokens": 16} == choose_trace_sizes(wishes)


def test_trace_size_at_the_limit_is_reduced() -> None:
    """A table cut to the traced size would show only above it."""
    assert {"sequence": 48} == choose_trace_sizes([SizeWish("sequence", 64, max=64)])
    assert {"sequence": 64} == choose_trace_sizes([SizeWish("sequence", 64, is_firm=True, max=64)])


def test_trace_size_stays_inside_narrow_bounds() -> None:
    """Bounds take precedence over every other rule."""
    assert {"a": 5} == choose_trace_sizes([SizeWish("a", 128, min=5, max=6)])
    assert {"a": 1} == choose_trace_sizes([SizeWish("a", 128, max=1)])
