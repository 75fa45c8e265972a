"""States that an operator updates in place, compared with copied ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError
from winml.modelkit.file_names import files_folder
from winml.modelkit.generate.generation.loop import generate_tokens
from winml.modelkit.generate.generation.settings import GenerationSettings
from winml.modelkit.ort.decoding.decoder import DecoderGraph
from winml.modelkit.ort.sessions import Session


class _CopyingSession(Session):
    """A session that replaces the states in each run."""

    takes_states_in_place = False


_FED_SUM = '{\\"output\\": \\"next_sum\\", \\"part\\": \\"model\\", \\"input\\": \\"sum\\"},'
_ADDED_SUM = """
            last = Constant <value = int64[1] {-1}> ()
            end = Constant <value = int64[1] {9223372036854775807}> ()
            numbers = Cast <to = 1> (input_ids)
            sums = CumSum (numbers, place)
            total_sum = Add (sums, sum)
            columns_of_sum = Unsqueeze (total_sum, last)
            logits = Add (scores, columns_of_sum)
            next_sum = Slice (total_sum, last, end, axis)"""


def _write_decoder(
    path: Path,
    *,
    extra: str = "",
    extra_output: str = "",
    has_sum: bool = False,
) -> Path:
    """Write a decoder of one attention with two heads, with the vectors of its tokens as keys and values.

    With ``has_sum``, a state of constant size is the sum of all tokens, which is added to the scores.
    """
    fed, scores, state, output = (
        (_FED_SUM, "scores", ", float[batch, 1] sum", ", float[batch, 1] next_sum")
        if has_sum
        else ("", "logits", "", "")
    )
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1],
         metadata_props: ["winml.part": "{{\\"name\\": \\"model\\", \\"of\\": [\\"model\\"], \\"feeds\\": [{fed}
            {{\\"output\\": \\"present_key\\", \\"part\\": \\"model\\", \\"input\\": \\"past_key\\"}},
            {{\\"output\\": \\"present_value\\", \\"part\\": \\"model\\", \\"input\\": \\"past_value\\"}}]}}"]>
        decoder (int64[batch, sequence] input_ids, int64[batch, total] attention_mask,
                 float[batch, 2, past, 8] past_key, float[batch, 2, past, 8] past_value{state})
            => (float[batch, sequence, 32] logits, float[batch, 2, total, 8] present_key,
                float[batch, 2, total, 8] present_value{output}{extra_output}) {{
            axis = Constant <value = int64[1] {{1}}> ()
            one = Constant <value = int32 {{1}}> ()
            place = Constant <value = int64 {{1}}> ()
            states = Gather (table, input_ids)
            counted = ReduceSum <keepdims = 0> (attention_mask, axis)
            filled = Cast <to = 6> (counted)
            seqlens = Sub (filled, one)
            sizes = Shape (attention_mask)
            wide = Gather (sizes, place)
            total_length = Cast <to = 6> (wide)
            attended, present_key, present_value = com.microsoft.GroupQueryAttention
                <num_heads = 2, kv_num_heads = 2>
                (states, states, states, past_key, past_value, seqlens, total_length)
            columns = Transpose <perm = [1, 0]> (table)
            {scores} = MatMul (attended, columns)
            {_ADDED_SUM if has_sum else ""}
            {extra}
        }}
    """)
    table = np.random.default_rng(3).normal(size=(32, 16)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(model, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the decoder."""
    return _write_decoder(tmp_path / "model.onnx")


def test_tokens_with_states_in_place_equal_tokens_with_copied_states(path: Path) -> None:
    """The text exceeds the first capacity, so the states move twice."""
    settings = GenerationSettings(max_new_tokens=450)
    in_place, copied = (
        [entry.token for entry in generate_tokens(DecoderGraph(kind(path)), [5, 9, 2], settings)]
        for kind in (Session, _CopyingSession)
    )
    assert copied == in_place
    assert DecoderGraph(Session(path)).adds_in_place


def test_dynamic_head_size_is_read_from_the_genai_config(path: Path) -> None:
    """The builder of genai leaves the head size dynamic; a config without it is an error with the file's name."""
    settings = GenerationSettings(max_new_tokens=9)
    expected = [entry.token for entry in generate_tokens(DecoderGraph(Session(path)), [5, 9, 2], settings)]
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        if len(value.type.tensor_type.shape.dim) == 4:
            value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    onnx.save(model, path)
    config = path.with_name("genai_config.json")
    config.write_text('{"model": {"decoder": {"head_size": 8}}}', encoding="utf-8")
    graph = DecoderGraph(Session(path))
    assert expected == [entry.token for entry in generate_tokens(graph, [5, 9, 2], settings)]
    config.write_text('{"model": {}}', encoding="utf-8")
    with pytest.raises(InputError, match=r"genai_config\.json.*head_size"):
        DecoderGraph(Session(path))


def test_files_of_a_model_lie_beside_it_despite_a_config_above(path: Path) -> None:
    """A folder of genai's builder has a config of its own, and no config.json."""
    model = path.parent / "genai" / "model.onnx"
    model.parent.mkdir()
    (path.parent / "config.json").touch()
    assert path.parent == files_folder(model)
    (model.parent / "genai_config.json").touch()
    assert model.parent == files_folder(model)


def test_run_writes_into_the_memory_of_the_run_before(path: Path) -> None:
    """The size of the cache counts the tokens, without spare capacity."""
    graph = DecoderGraph(Session(path))
    cache = graph.empty_cache(1)
    graph.run(np.array([[1, 2, 3]]), cache=cache)
    value = cache.values["past_key"]
    before = value.data_ptr()
    graph.run(np.array([[4]]), cache=cache)
    assert before == cache.values["past_key"].data_ptr()
    assert 2 * 4 * 2 * 8 * 4 == cache.size_bytes()


def test_cache_copy_stays_unchanged(path: Path) -> None:
    """Two texts with a common beginning continue as if generated alone, in either order; so do rows."""
    graph, copying = DecoderGraph(Session(path)), DecoderGraph(_CopyingSession(path))
    logits = {}
    for name, decoder in (("in place", graph), ("copied", copying)):
        cache = decoder.empty_cache(2)
        decoder.run(np.array([[1, 2, 3], [7, 8, 9]]), cache=cache)
        kept = cache.__copy__()
        first = [decoder.run(np.array([[4], [5]]), cache=cache) for _ in range(2)]
        second = [decoder.run(np.array([[6], [7]]), cache=kept) for _ in range(2)]
        cache.reorder_cache(np.array([1, 1]))
        logits[name] = [*first, *second, decoder.run(np.array([[4], [5]]), cache=cache)]
    np.testing.assert_allclose(logits["in place"], logits["copied"], rtol=1e-6)


def test_steps_among_other_runs_equal_those_with_copied_states(path: Path) -> None:
    """A step after a step keeps its inputs bound; runs of several tokens, or with a mask, come in between.

    The tokens of the caller, and earlier scores, stay unchanged.
    """
    runs = [[1, 2, 3], [4], [5], [6, 7], [8], [9], [4], [5]]
    logits = {}
    for kind in (Session, _CopyingSession):
        graph = DecoderGraph(kind(path))
        cache, scores = graph.empty_cache(1), []
        for number, tokens in enumerate(runs):
            mask = np.ones((1, cache.length + len(tokens)), np.int64) if number == 5 else None
            fed = np.array([tokens])
            scores.append(graph.run(fed, mask, cache=cache))
            assert tokens == fed[0].tolist()
        logits[kind] = np.concatenate(scores, axis=1)
    np.testing.assert_allclose(logits[Session], logits[_CopyingSession], rtol=1e-6)


def test_rewound_cache_gives_equal_outputs(path: Path) -> None:
    """A step that is measured repeatedly starts from the same tokens."""
    graph = DecoderGraph(Session(path))
    cache = graph.empty_cache(1)
    graph.run(np.array([[1, 2, 3]]), cache=cache)
    taken, logits = cache.__copy__(), []
    for _ in range(2):
        taken.rewind(cache)
        logits.append(graph.run(np.array([[4]]), cache=taken))
    np.testing.assert_array_equal(*logits)
    assert (3, 4) == (cache.length, taken.length)


def test_state_with_another_reader_is_copied(tmp_path: Path) -> None:
    """A node that reads a whole state would also read its spare capacity."""
    path = _write_decoder(
        tmp_path / "read.onnx",
        extra="seen = ReduceSum <keepdims = 0> (past_key)",
        extra_output=", float seen",
    )
    graph = DecoderGraph(Session(path))
    assert not graph.adds_in_place
    cache = graph.empty_cache(1)
    graph.run(np.array([[1, 2, 3]]), cache=cache)
    assert (1, 2, 3, 8) == tuple(cache.values["past_key"].shape())


def test_shorter_row_reads_no_padding_into_a_state_of_constant_size(tmp_path: Path) -> None:
    """Each row of a padded batch has the scores that it has alone, also after the padding."""
    graph = DecoderGraph(Session(_write_decoder(tmp_path / "model.onnx", has_sum=True)))
    tokens, mask = np.array([[7, 7, 5, 9], [3, 1, 2, 7]]), np.array([[0, 0, 1, 1], [1] * 4])
    steps = np.array([[4, 8], [6, 2]])

    def read(rows: slice, start: int) -> list[Array]:
        visible, cache = mask[rows, start:], graph.empty_cache(len(mask[rows]))
        scores = [graph.run(tokens[rows, start:], visible, cache=cache)[:, -1]]
        for step in steps[rows].T:
            visible = np.pad(visible, ((0, 0), (0, 1)), constant_values=1)
            scores.append(graph.run(step[:, None], visible, cache=cache)[:, -1])
        return scores

    together, alone = read(slice(2), 0), [read(slice(0, 1), 2), read(slice(1, 2), 0)]
    for row, expected in enumerate(alone):
        for found, scores in zip(together, expected, strict=True):
            np.testing.assert_allclose(found[row], scores[0], rtol=1e-5, atol=1e-4)
