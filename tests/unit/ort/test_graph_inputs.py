"""Sizes and values of inputs, and refusals of values that do not fit."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.onnx.specs import InputTensorSpec, graph_input
from winml.modelkit.ort.graph_inputs import batch_of, draw_feeds, graph_inputs, load_feeds, settle_sizes
from winml.modelkit.ort.sessions import Session

IDS = graph_input("ids", "int64", ("batch", "sequence"))
MASK = graph_input("mask", "int64", ("batch", "sequence"))
NAMELESS = graph_input("x", "float32", (None, 3, None))


def session(text: str, metadata: dict[str, str] | None = None) -> Session:
    """Open a graph written as text."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]>\n{text}')
    for key, value in (metadata or {}).items():
        model.metadata_props.add(key=key, value=value)
    return Session(model.SerializeToString())


def saved(folder: Path, **arrays: Any) -> Path:
    """Write an .npz file."""
    np.savez(folder / "values.npz", **arrays)
    return folder / "values.npz"


def test_inputs_are_read_off_the_graph() -> None:
    """An input has numpy's dtype, the names of its dimensions (None without a name), and the range in the file."""
    found = graph_inputs(
        session(
            "g (float16[N, 2] a, double b, int64[?] c, string[1] d) => (float16[N, 2] y)\n{ y = Identity(a) }",
            {"winml.io.inputs": json.dumps([{"name": "c", "value_range": [3, 9], "first_values": [[7, 2]]}])},
        )
    )
    assert (
        graph_input("a", "float16", ("N", 2)),
        graph_input("b", "float64", ()),
        graph_input("c", "int64", (None,), {"value_range": (3.0, 9.0), "first_values": ((7, 2),)}),
        graph_input("d", "string", (1,)),
    ) == found


@pytest.mark.parametrize(
    "text",
    [
        "{", "[1]", '[{"name": "x"}]', '{"x": 1}', '[{"name": "x", "value_range": "ab"}]',
        '[{"name": "x", "first_values": [1, 2]}]', '[{"name": "x", "first_values": [[1, -2]]}]',
    ],
)  # fmt: skip
def test_damaged_metadata_states_no_range(text: str) -> None:
    """A foreign value under our key does not prevent a measurement."""
    found = graph_inputs(session("g (float[1] x) => (float[1] y)\n{ y = Neg(x) }", {"winml.io.inputs": text}))
    assert (graph_input("x", "float32", (1,)),) == found


def test_sizes_come_by_name_by_key_and_by_place() -> None:
    """A size has a name in the file, a key of --shape-config, or INPUT:AXIS if the dimension has no name."""
    sizes = settle_sizes([IDS, NAMELESS], {"batch_size": 4, "sequence": 9, "x:0": 2, "x:2": 5})
    assert {"batch": 4, "sequence": 9, "x:0": 2, "x:2": 5} == sizes.by_name
    assert () == sizes.notes


def test_missing_sizes_are_chosen_with_a_note() -> None:
    """The sizes are common ones, and a note has them."""
    sizes = settle_sizes([IDS], {"batch": 3})
    assert {"batch": 3, "sequence": 128} == sizes.by_name
    assert ("default sizes: sequence 128 (change them with --shape-config)",) == sizes.notes


def test_size_of_unknown_meaning_is_chosen_by_its_place() -> None:
    """A first dimension is usually the batch; an axis of four is an edge of an image, and a count is small."""
    assert {"x:0": 1, "x:2": 7} == settle_sizes([NAMELESS], {"x:2": 7}).by_name
    assert {"x:0": 1, "x:2": 8} == settle_sizes([NAMELESS], {}).by_name
    image = graph_input("image", "float32", (1, 3, "h", "w"))
    edges = graph_input("edges", "int64", (2, "num_edges"))
    assert {"h": 224, "w": 224, "num_edges": 8} == settle_sizes([image, edges], {}).by_name


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([IDS, MASK], {"batch": 5, "sequence": 128}),
        ([graph_input("x", "float32", (None, 3))], {"x:0": 5}),
        ([graph_input("x", "float32", (5, 3))], {}),
    ],
)
def test_batch_size_sets_the_batch_dimension(inputs: list[InputTensorSpec], expected: dict[str, int]) -> None:
    """The first dimension is the batch if it has that name, no name, or this size already."""
    assert expected == settle_sizes(inputs, {}, batch_size=5).by_name


@pytest.mark.parametrize("shape", [(1, 3), ("rows", 3), ()])
def test_batch_size_without_an_open_batch_is_refused(shape: tuple[int | str, ...]) -> None:
    """The input has a fixed first size, a dimension of another name, or no dimension."""
    with pytest.raises(UsageError, match="batch dimension: x float32"):
        settle_sizes([graph_input("x", "float32", shape)], {}, batch_size=5)


def test_batch_size_and_shapes_that_disagree_are_refused() -> None:
    """The options give two sizes for one dimension."""
    with pytest.raises(UsageError, match="--batch-size 5: --shape-config sets batch to 2"):
        settle_sizes([IDS], {"batch": 2}, batch_size=5)


def test_draws_stay_in_the_stated_range() -> None:
    """The same seed gives the same values."""
    item = graph_input("ids", "int64", ("batch", 50), {"value_range": (3.0, 9.0)})
    first, again, other = (draw_feeds([item], {"batch": 4}, seed)["ids"] for seed in (0, 0, 1))
    assert ((4, 50), 3, 9) == (first.shape, first.min(), first.max())
    assert first.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "uint64", "uint16", "int8", "bool"])
def test_draws_have_the_dtype_of_the_input(dtype: str) -> None:
    """Every dtype of ONNX Runtime can be drawn."""
    assert dtype == str(draw_feeds([graph_input("x", dtype, (2,))], {}, 0)["x"].dtype)


def test_stated_values_are_drawn() -> None:
    """Text and numbers take stated values only, and offsets ascend; text without stated values is words."""
    rate = graph_input("rate", "int64", (), {"values": (8000, 16000)})
    column = graph_input("column", "string", (9,), {"values": ("a", "b")})
    offsets = graph_input("offsets", "int64", (20,), {"value_range": (0, 9), "ascending": True})
    feeds = draw_feeds([rate, column, offsets, graph_input("text", "string", (2,))], {}, 0)
    assert int(feeds["rate"]) in (8000, 16000)
    assert {"a", "b"} == set(feeds["column"])
    assert sorted(feeds["offsets"]) == list(feeds["offsets"]) != [0] * 20
    assert "U" == feeds["text"].dtype.kind
    assert {"values": [8000, 16000]}.items() <= rate.as_record().items()


@pytest.mark.parametrize(("dtype", "is_array"), [("float8e4m3fn", True), ("seq(tensor(float))", False)])
def test_undrawable_values_are_required(dtype: str, is_array: bool, tmp_path: Path) -> None:
    """Exotic dtypes and sequences cannot be drawn; no file has the values of a sequence either."""
    inputs = [graph_input("x", dtype, (2,))]
    with pytest.raises(UsageError, match="x takes") as caught:
        draw_feeds(inputs, {}, 0)
    assert is_array == ("--input-data" in caught.value.hint)
    if not is_array:
        with pytest.raises(UsageError, match="only arrays"):
            load_feeds(saved(tmp_path, x=np.zeros(2, np.float32)), inputs)


def test_file_gives_each_input_its_array(tmp_path: Path) -> None:
    """The arrays keep their values, in the order of the graph's inputs."""
    ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3), np.int64)
    feeds = load_feeds(saved(tmp_path, mask=mask, ids=ids), [IDS, MASK])
    assert [("ids", ids.tolist()), ("mask", mask.tolist())] == [(name, array.tolist()) for name, array in feeds.items()]


def test_file_gives_bfloat16_and_text_back(tmp_path: Path) -> None:
    """An .npz file has no name for bfloat16, and may hold text as bytes."""
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    path = saved(tmp_path, x=values, t=np.array(["a", "é"]), u=np.array([b"a"]))
    items = [graph_input("x", "bfloat16", (2,)), graph_input("t", "string", (2,)), graph_input("u", "string", (1,))]
    feeds = load_feeds(path, items)
    assert (ml_dtypes.bfloat16, [1.5, -2.0]) == (feeds["x"].dtype, feeds["x"].tolist())
    assert (["a", "é"], ["a"]) == (feeds["t"].tolist(), feeds["u"].tolist())


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"ids": np.ones((1, 4), np.int64)}, "'mask'"),
        ({"id": np.ones((1, 4), np.int64)}, "'id'"),
        ({"ids": np.ones((1, 4), np.int32)}, "int32[1, 4]"),
        ({"ids": np.ones(4, np.int64)}, "int64[4]"),
        (
            {"ids": np.ones((1, 4), np.int64), "mask": np.ones((1, 5), np.int64)},
            "4 in 'ids' and 5",
        ),
    ],
)
def test_file_that_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    """The message names the input, the value and the expectation."""
    path = saved(tmp_path, **{"mask": np.ones((1, 4), np.int64), **arrays} if "mask" not in words[:30] else arrays)
    with pytest.raises(UsageError) as caught:
        load_feeds(path, [IDS, MASK])
    assert words in caught.value.message
    assert caught.value.hint


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    """A missing file, a single array, text and pickled objects are errors; pickles are never loaded."""
    with pytest.raises(UsageError, match="no such"):
        load_feeds(tmp_path / "none.npz", [IDS])
    np.save(tmp_path / "one.npy", np.ones(2))
    with pytest.raises(UsageError, match="one array"):
        load_feeds(tmp_path / "one.npy", [IDS])
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04 no zip")
    np.savez(tmp_path / "objects.npz", ids=np.array([object()]))
    (tmp_path / "text.npz").write_text("ids", encoding="utf-8")
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ("junk", "objects", "text", "empty"):
        with pytest.raises(InputError, match=r"\.npz file"):
            load_feeds(tmp_path / f"{name}.npz", [IDS])


def test_array_that_declares_too_much_is_refused_by_its_header(tmp_path: Path) -> None:
    """The declared size exceeds the file or the memory; other files of an archive are no arrays."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (1, 2**40)})
    foreign = {"lying": header.getvalue() + bytes(64), "text": b"ids", "new": b"\x93NUMPY\x03\x00" + bytes(64)}
    for name, content in foreign.items():
        with zipfile.ZipFile(tmp_path / f"{name}.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ids.npy", content)
        with pytest.raises(InputError) as caught:
            load_feeds(tmp_path / f"{name}.npz", [IDS])
        assert f"{name}.npz" in caught.value.message
        assert (name == "lying") == ("array 'ids' declares 8796.09 GB" in caught.value.message)
    (tmp_path / "one.npy").write_bytes(header.getvalue())
    with pytest.raises(UsageError, match="one array"):
        load_feeds(tmp_path / "one.npy", [IDS])


def test_batch_is_the_dimension_of_that_name() -> None:
    """The batch may be any dimension."""
    item = graph_input("x", "float32", ("time", "batch_size"))
    assert (7, "dimension batch_size") == batch_of([item], {"x": np.ones((2, 7))}, {"y": np.ones(1)})


@pytest.mark.parametrize(
    ("fed", "made", "batch"),
    [
        ([(4, 3), (4,)], [(4, 8)], 4),
        ([(4, 3), ()], [(4, 8)], 4),
        ([(4, 3)], [(2, 8)], 1),
        ([(3, 8, 8)], [(1, 8)], 1),
        ([], [(4,)], 1),
    ],
)
def test_unnamed_batch_is_the_first_shared_size(
    fed: list[tuple[int, ...]], made: list[tuple[int, ...]], batch: int
) -> None:
    """The batch is the first size that inputs and outputs share; without one, a run is one sample."""
    inputs = [graph_input(str(number), "float32", shape) for number, shape in enumerate(fed)]
    feeds = {item.name: np.ones(shape) for item, shape in zip(inputs, fed, strict=True)}
    outputs = {str(number): np.ones(shape) for number, shape in enumerate(made)}
    assert batch == batch_of(inputs, feeds, outputs)[0]


def test_size_may_be_set_by_position_for_a_named_dimension() -> None:
    """A dimension has its size at every position; a position with another size than the name is refused."""
    assert {"batch": 2, "sequence": 5} == settle_sizes([IDS, MASK], {"mask:1": 5, "batch": 2}).by_name
    with pytest.raises(UsageError, match="5 and 6"):
        settle_sizes([IDS, MASK], {"mask:1": 5, "ids:1": 6})


def test_cache_of_a_later_version_is_read() -> None:
    """Keys that are unknown here are ignored; the tensor of the cache is known all the same."""
    (item,) = [graph_input("past", "float32", (1, 2), {"cache": {"layer": 0, "kind": "key", "later": 1}})]
    assert item.cache is not None
    assert ("key", 0) == (item.cache.kind, item.cache.layer)


def test_input_without_a_rank_takes_any_shape(tmp_path: Path) -> None:
    """ONNX Runtime reports such an input like a scalar, which takes no other shape."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]>\ng (float[1] x, float s) => (float[1] y)\n{ y = Add(x, s) }'
    )
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "a.onnx")
    inputs = graph_inputs(Session(tmp_path / "a.onnx"))
    values, scalar = np.ones((2, 3), np.float32), np.float32(1)
    feeds = load_feeds(saved(tmp_path, x=values, s=scalar), inputs)
    assert (2, 3) == feeds["x"].shape
    with pytest.raises(UsageError, match="input 's'"):
        load_feeds(saved(tmp_path, x=values, s=values), inputs)
