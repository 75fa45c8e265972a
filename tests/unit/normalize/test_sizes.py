"""Simplification of size computations in graphs with dynamic dimensions, with equal outputs at every size."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphs import answer, operators, parse, tags
from winml.modelkit.normalize.pipeline import normalize

SIZES = ((1, 1), (2, 3), (3, 5))
"""Sizes of batch and sequence: one pair of ones and two pairs of different sizes."""

ENDINGS = {
    "torchscript": "sh = Shape (x)  b0 = Gather (sh, zero)  s0 = Gather (sh, one)  b = Unsqueeze (b0, first)"
    "  s = Unsqueeze (s0, first)",
    "dynamo": "b = Shape <start=0, end=1> (x)  s = Shape <start=1, end=2> (x)",
}
"""Nodes with which each exporter reads the two sizes of ``x``."""
NUMBERS = "zero = Constant <value_int=0> ()  one = Constant <value_int=1> ()  first = Constant <value_ints=[0]> ()"


def _graph(inputs: str, output: str, body: str) -> str:
    return f"m ({inputs}) => ({output}) {{ {NUMBERS}  {body} }}"


@pytest.mark.parametrize("ending", ENDINGS)
def test_heads_are_split_and_joined_by_constant_shapes(ending: str) -> None:
    """The sizes of rows and tokens are copied, the number of heads is a number."""
    model = parse(
        _graph(
            "float[batch,sequence,8] x",
            "float[batch,sequence,8] y",
            f"{ENDINGS[ending]}  minus = Constant <value_ints=[-1]> ()  four = Constant <value_ints=[4]> ()"
            "  split = Concat <axis=0> (b, s, minus, four)  h = Reshape (x, split)"
            "  t = Transpose <perm=[0,2,1,3]> (h)  back = Transpose <perm=[0,2,1,3]> (t)"
            "  join = Concat <axis=0> (b, s, minus)  j = Reshape (back, join)  y = Relu (j)",
        )
    )
    _check(model, ["Reshape", "Transpose", "Transpose", "Reshape", "Relu"], 8)
    shapes = [value.const_value.numpy().tolist() for value in model.graph.initializers.values() if value.const_value]
    assert sorted(shapes) == [[0, 0, 2, 4], [0, 0, 8]]
    assert ["batch", "2", "sequence", "4"] == [str(size) for size in list(model.graph)[1].outputs[0].shape or ()]


def test_required_size_is_read_once() -> None:
    """Two slices of a table have as many rows as there are tokens."""
    body = (
        f"{ENDINGS['torchscript']}  shape2 = Shape (x)  s1 = Gather (shape2, one)  s2 = Unsqueeze (s1, first)"
        "  p = Slice (table, first, s, first)  q = Slice (table, first, s2, first)  a = Add (x, p)  y = Add (a, q)"
    )
    model = parse(
        f"m (float[batch,sequence,2] x) => (float[batch,sequence,2] y)"
        f"<float[6,2] table = {{1,2,3,4,5,6,7,8,9,10,11,12}}> {{ {NUMBERS}  {body} }}"
    )
    _check(model, ["Shape", "Gather", "Unsqueeze", "Slice", "Slice", "Add", "Add"], 2)


def test_whole_slices_and_expansions_to_the_own_shape_are_removed() -> None:
    """A slice of all elements, torch's Expand with -1 and a reshape with its inverse have no effect."""
    body = (
        f"{ENDINGS['torchscript']}  sliced = Slice (x, first, b, first)  two = Constant <value_ints=[2]> ()"
        "  asked = Concat <axis=0> (b, s, two)  minus = Constant <value_ints=[-1,-1,-1]> ()"
        "  is_kept = Equal (asked, minus)  ones = Constant <value_ints=[1,1,1]> ()"
        "  shape = Where (is_kept, ones, asked)"
        "  wide = Expand (sliced, shape)  rest = Constant <value_ints=[-1, 2]> ()  flat = Reshape (wide, rest)"
        "  full = Reshape (flat, asked)  y = Relu (full)"
    )
    model = parse(_graph("float[batch,sequence,2] x", "float[batch,sequence,2] y", body))
    _check(model, ["Relu"], 2)


def test_table_read_for_its_size_only_is_removed() -> None:
    """Repeated once for each row, the positions of a token are as many as the rows."""
    body = (
        "sh = Shape (x)  b = Gather (sh, zero)  rows = Unsqueeze (b, first)  once = Constant <value_ints=[1]> ()"
        "  repeats = Concat <axis=0> (rows, once)  place = Constant <value=int64[1,1] {0}> ()"
        "  places = Tile (place, repeats)  read = Gather (table, places)  positions = Shape (read)"
        "  count = Gather (positions, zero)  n = Unsqueeze (count, first)  minus = Constant <value_ints=[-1]> ()"
        "  shape = Concat <axis=0> (n, minus)  y = Reshape (x, shape)"
    )
    model = parse(
        f"m (float[batch,2,3] x) => (float[batch,6] y)<float[2,2] table = {{1,2,3,4}}> {{ {NUMBERS}  {body} }}"
    )
    x = np.random.default_rng(0).standard_normal((3, 2, 3), dtype=np.float32)
    assert normalize(model).changed
    assert ["Reshape"] == operators(model)
    assert "table" not in model.graph.initializers
    assert np.array_equal(x.reshape(3, 6), answer(model, x=x)[0])


def test_mask_read_element_by_element_is_reshaped() -> None:
    """Transformers computes a mask by positions; those of all elements in order are the mask itself."""
    body = (
        "sh = Shape (m)  b = Gather (sh, zero)  s = Gather (sh, one)"
        "  rows = Range (zero, b, one)  columns = Range (zero, s, one)"
        "  behind = Constant <value_ints=[1,2,3]> ()  before = Constant <value_ints=[0,1,2]> ()"
        "  r = Unsqueeze (rows, behind)  c = Unsqueeze (columns, before)"
        "  flat = Flatten <axis=2> (m)  start = Mul (r, s)  index = Add (start, c)  taken = Gather (flat, index)"
        "  shape = Shape (index)  four = Reshape (taken, shape)"
        "  is_position = GreaterOrEqual (c, zero)  both = And (four, is_position)  y = Cast <to=1> (both)"
    )
    model = parse(_graph("bool[batch,sequence] m", "float[batch,one,one,sequence] y", body))
    assert normalize(model).changed
    assert "Gather" not in operators(model)
    assert operators(model)[-1] == "Cast"
    assert set(operators(model)) == {"Reshape", "Cast"}
    mask = np.array([[True, False, True], [False, False, True]])
    assert np.array_equal(mask[:, None, None], np.asarray(answer(model, m=mask)[0], dtype=bool))


def test_keys_are_transposed_at_once() -> None:
    """The dynamo exporter joins rows and heads, transposes, and takes them apart again."""
    body = (
        "sh = Shape (x)  two = Constant <value_ints=[2]> ()  three = Constant <value_ints=[3]> ()"
        "  four = Constant <value_ints=[4]> ()  second = Constant <value_ints=[1]> ()"
        "  b = Slice (sh, first, two)  s = Slice (sh, two, three)  d = Slice (sh, three, four)"
        "  minus = Constant <value_ints=[-1]> ()  joined = Concat <axis=0> (minus, s, d)  j = Reshape (x, joined)"
        "  t = Transpose <perm=[0,2,1]> (j)  apart = Concat <axis=0> (b, d, s)  y0 = Reshape (t, apart)  y = Relu (y0)"
    )
    model = parse(_graph("float[batch,2,sequence,4] x", "float[batch,2,four,sequence] y", body))
    x = np.random.default_rng(0).standard_normal((3, 2, 5, 4), dtype=np.float32)
    assert normalize(model).changed
    assert ["Transpose", "Relu"] == operators(model)
    assert np.array_equal(np.maximum(x.swapaxes(2, 3), 0), answer(model, x=x)[0])


def test_axis_that_may_be_empty_is_computed() -> None:
    """The size -1 is ambiguous beside an empty cache axis; the graph still runs with an empty cache."""
    body = (
        "two = Constant <value_ints=[2]> ()  one1 = Constant <value_ints=[1]> ()  four = Constant <value_ints=[4]> ()"
        "  sh = Shape (past)  b = Slice (sh, first, one1)  p = Slice (sh, one1, two)  rows = Mul (b, two)"
        "  joined = Concat <axis=0> (rows, p, four)  r = Reshape (past, joined)  y = Relu (r)"
        "  all = Concat <axis=1> (past, x)  z = Relu (all)"
    )
    inputs = "float[batch,past,2,4] past, float[batch,new,2,4] x"
    model = parse(_graph(inputs, "float[rows,past,4] y, float[batch,total,2,4] z", body))
    normalize(model)
    past, new = np.zeros((3, 0, 2, 4), np.float32), np.ones((3, 1, 2, 4), np.float32)
    first, second = answer(model, past=past, x=new)
    assert np.shape(first) == (6, 0)
    assert np.array_equal(new, second)


SHAPE_OF_X = "sh = Shape (x)  p = Gather (sh, zero)  second = Constant <value_ints=[1]> ()"
MISREADINGS = {
    "differences of positions and their transpose": (
        "count = Constant <value_ints=[0,1,2,3]> ()  pos = Add (count, p)"
        "  across = Unsqueeze (count, first)  down = Unsqueeze (count, second)  pa = Unsqueeze (pos, first)"
        "  pd = Unsqueeze (pos, second)  d = Sub (pd, across)  e = Sub (pa, down)  y = Concat <axis=0> (d, e)"
    ),
    "axes that an input gives": (
        "end = Slice (sh, first, second)  cut = Slice (x, first, end, axis)  y = Cast <to=7> (cut)"
    ),
    "a table of fewer rows": (
        "end = Slice (sh, first, second)  table = Constant <value_ints=[5,6]> ()"
        "  cut = Slice (table, first, end)  y0 = Shape (cut)  y = Unsqueeze (y0, first)"
    ),
    "two constants of the same numbers": (
        "two = Constant <value_ints=[2]> ()  last = Slice (sh, second, two)"
        "  pair = Concat <axis=0> (last, two)  a = Unsqueeze (pair, first)  b = Unsqueeze (pair, second)"
        "  y = Add (a, b)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISREADINGS)
def test_similar_expressions_are_distinguished(case: str) -> None:
    """Each was answered wrongly by a rule that compared elements without axes, or took a size for granted."""
    body = f"{SHAPE_OF_X}  {MISREADINGS[case]}"
    model = parse(_graph("float[p,4] x, int64[1] axis", "int64[m,n] y", body))
    feeds = [{"x": np.ones((rows, 4), np.float32), "axis": np.array([1])} for rows in (2, 3)]
    before = [answer(model, **given) for given in feeds]
    normalize(model)
    assert before == [answer(model, **given) for given in feeds]


def test_parts_of_a_split_have_their_own_sizes() -> None:
    """The sizes of Split are an attribute before opset 13."""
    body = "a, c = Split <axis=1, split=[2,4]> (x)  z = Shape (a)  y = Relu (c)"
    model = parse(f"m (float[b,6] x) => (float[b,n] y, int64[2] z) {{ {body} }}", opset=12)
    feeds = {"x": np.ones((3, 6), np.float32)}
    before = answer(model, **feeds)
    normalize(model)
    assert before == answer(model, **feeds)


def test_wrong_size_in_a_file_is_ignored() -> None:
    """An inner shape from before the rows were opened."""
    model = parse(
        "m (float[batch,s,4] x) => (float[k,n] y) <float[1,s,4] a> { first = Constant <value_ints=[0]> ()"
        "  one = Constant <value_ints=[1]> ()  minus = Constant <value_ints=[-1]> ()  a = Relu (x)  sh = Shape (a)"
        "  b = Slice (sh, first, one)  t = Concat <axis=0> (b, minus)  y = Reshape (x, t) }"
    )
    normalize(model)
    assert np.shape(answer(model, x=np.ones((3, 2, 4), np.float32))[0]) == (3, 8)


def test_parameters_of_zeros_stay() -> None:
    """A bias of zeros is not removed."""
    model = parse("m (float[b,2] x) => (float[b,2] y) <float[2] bias = {0, 0}> { a = Add (x, bias)  y = Relu (a) }")
    normalize(model)
    assert ["Add", "Relu"] == operators(model)


def _check(model: ir.Model, expected: list[str], width: int) -> None:
    """Check operators and tags of a normalized graph, and equal outputs at several sizes."""
    rng = np.random.default_rng(0)
    feeds = [rng.standard_normal((*sizes, width), dtype=np.float32) for sizes in SIZES]
    before = [answer(model, x=x)[0] for x in feeds]
    assert normalize(model).changed
    assert expected == operators(model)
    assert all(tags(model))
    assert all(np.array_equal(old, answer(model, x=x)[0]) for old, x in zip(before, feeds, strict=True))
    assert not normalize(model).changed
