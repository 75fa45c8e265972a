"""Choice of tokens and transfer of states during generation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, LlamaConfig

from generating import PROMPT, counting_graph, save_tokenizer
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.generate.generation.decoder_prompt import DecoderPrompt
from winml.modelkit.generate.generation.loop import choose_token, generate_tokens, processed_scores
from winml.modelkit.generate.generation.settings import (
    GenerationSettings,
    position_limit,
    read_settings,
)
from winml.modelkit.generate.generation.text import read_tokenizer
from winml.modelkit.ort.decoding.decoder import DecoderGraph
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.chat_templates import chat_prompt


class _Processors(GenerationMixin):
    """Arguments from which transformers makes its processors."""

    config = LlamaConfig()


@pytest.fixture
def graph(tmp_path: Path) -> DecoderGraph:
    """The decoder with the sum of all tokens mod 8 as logits."""
    return DecoderGraph(Session(counting_graph(tmp_path / "counting.onnx")))


@pytest.mark.parametrize(
    "step",
    [
        GenerationSettings(repetition_penalty=1.7),
        GenerationSettings(is_sampled=True, temperature=0.6, top_k=20, top_p=0.9),
        GenerationSettings(is_sampled=True, top_k=0, top_p=0.5, min_p=0.05, repetition_penalty=0.8),
        GenerationSettings(is_sampled=True, top_k=7, min_p=0.2),
    ],
    ids=str,
)
def test_scores_equal_the_processors_of_transformers(step: GenerationSettings) -> None:
    """The same logits leave the same tokens with the same scores."""
    logits = np.random.default_rng(0).normal(size=(50,)).astype(np.float32) * 3
    before = [3, 7, 7, 41]
    config = GenerationConfig(
        do_sample=step.is_sampled,
        temperature=step.temperature,
        top_k=step.top_k,
        top_p=step.top_p,
        min_p=step.min_p,
        repetition_penalty=step.repetition_penalty,
        num_beams=1,
    )
    processors = _Processors()._get_logits_processor(config, input_ids_seq_length=len(before), logits_processor=None)
    expected = processors(torch.tensor([before]), torch.from_numpy(logits.copy())[None])[0].numpy()
    np.testing.assert_allclose(processed_scores(logits, before, step), expected, rtol=1e-6)


def test_tokens_are_drawn_by_their_probability() -> None:
    """Three quarters of the draws are the token of that probability, and a seed repeats its draws."""
    logits = np.log(np.array([0.75, 0.25, 1e-9]))
    step = GenerationSettings(is_sampled=True, top_k=2)
    drawn = [choose_token(logits, [], step, np.random.default_rng(seed)) for seed in range(400)]
    assert 0.7 < np.mean(np.array(drawn) == 0) < 0.8
    assert {0, 1} == set(drawn)
    assert drawn[:9] == [choose_token(logits, [], step, np.random.default_rng(seed)) for seed in range(9)]


def test_state_of_any_kind_is_handed_from_step_to_step(graph: DecoderGraph) -> None:
    """A recurrent state of any name starts with zeros, and feeds the input named in ``winml.part``."""
    settings = GenerationSettings(max_new_tokens=4)
    tokens = list(generate_tokens(graph, [1, 2], settings))
    # 1 + 2 = 3; + 3 = 6; + 6 = 12, mod 8 = 4; + 4 = 16, mod 8 = 0
    assert [3, 6, 4, 0] == [entry.token for entry in tokens]
    assert "length" == tokens[-1].end
    assert [3, 6] == [entry.token for entry in generate_tokens(graph, [1, 2], replace(settings, eos_token_ids=(6,)))]


def test_language_and_task_tokens_do_not_count_as_new(graph: DecoderGraph) -> None:
    """The requested number of tokens follows them; the last position holds the token that ends a text."""
    settings = GenerationSettings(max_new_tokens=2)
    beginning = DecoderPrompt(1, prompt_places=2, allowed={1: (5,), 2: (7,)}, last=0)
    tokens = [entry.token for entry in generate_tokens(graph, [1], settings, beginning=beginning)]
    # 1 + 5 + 7 = 13, mod 8 = 5
    assert [5, 7, 5, 0] == tokens


def test_cache_rows_can_be_reordered(graph: DecoderGraph) -> None:
    """Beam search reorders rows; an earlier copy stays unchanged."""
    cache = graph.empty_cache(2)
    graph.run(np.array([[1], [5]]), cache=cache)
    kept = cache.__copy__()
    cache.reorder_cache(np.array([1, 1]))
    assert [[[5]], [[5]]] == graph.run(np.zeros((2, 1), np.int64), cache=cache).argmax(-1)[..., None].tolist()
    assert [[1], [5]] == graph.run(np.zeros((2, 1), np.int64), cache=kept).argmax(-1).tolist()
    assert 2 == cache.get_seq_length()


def test_cache_of_another_model_is_refused(graph: DecoderGraph, tmp_path: Path) -> None:
    """The error names the other model, or the two numbers of rows."""
    other = DecoderGraph(Session(counting_graph(tmp_path / "other.onnx")))
    with pytest.raises(UsageError, match=r"other\.onnx: .*counting\.onnx"):
        graph.run(np.array([[1]]), cache=other.empty_cache(1))
    with pytest.raises(UsageError, match=r"3 rows .* 2"):
        graph.run(np.ones((3, 1), np.int64), cache=graph.empty_cache(2))


def test_padding_leaves_a_fixed_size_state_unchanged(tmp_path: Path) -> None:
    """Each row of a padded batch has the logits that it has alone, in runs of one token or of several."""
    tokens, mask = np.array([[7, 7, 1, 2], [3, 1, 2, 1]]), np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    files = [
        counting_graph(tmp_path / "any.onnx"),
        counting_graph(tmp_path / "masked.onnx", mask="total"),
        counting_graph(tmp_path / "single.onnx", sequence="1", mask="1"),
    ]
    for path in files:
        graph = DecoderGraph(Session(path))
        cache = graph.empty_cache(2)
        assert [[1, 3], [6, 7]] == graph.run(tokens, mask, cache=cache)[:, 2:].argmax(-1).tolist()
        step = graph.run(np.array([[4], [5]]), np.ones((2, 5), np.int64), cache=cache)
        assert [[7], [12 % 8]] == step.argmax(-1).tolist()
        # Padding behind the tokens of a row, and a row that is hidden in one step.
        graph.run(np.array([[5], [1]]), np.array([[0, 0, 1, 1, 1, 0], [1] * 6]), cache=cache)
        after = graph.run(np.array([[1], [1]]), np.array([[0, 0, 1, 1, 1, 0, 1], [1] * 7]), cache=cache)
        assert [[8 % 8], [14 % 8]] == after.argmax(-1).tolist()


def test_unmasked_padding_is_refused(tmp_path: Path) -> None:
    """A growing cache without a mask would hold the padding; a mask without padding is accepted."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        growing (int64[batch, tokens] input_ids, float[batch, 1, past, 1] "past_key_values.0.key")
            => (float[batch, tokens, 1] logits, float[batch, 1, total, 1] "present.0.key")
            <int64[1] first = {1}, int64[1] last = {-1}>
        {
            numbers = Cast <to = 1> (input_ids)
            logits = Unsqueeze (numbers, last)
            keys = Unsqueeze (logits, first)
            "present.0.key" = Concat <axis = 2> ("past_key_values.0.key", keys)
        }
    """)
    onnx.save(model, tmp_path / "growing.onnx")
    graph = DecoderGraph(Session(tmp_path / "growing.onnx"))
    rows = np.array([[0, 1], [1, 1]])
    with pytest.raises(UsageError, match=r"growing\.onnx .*attention_mask"):
        graph.run(rows, mask=np.array([[0, 1], [1, 1]]))
    assert (2, 2, 1) == graph.run(rows, mask=np.ones((2, 2), np.int64)).shape


def test_rows_a_static_graph_does_not_take_are_refused(tmp_path: Path) -> None:
    """The message has the number of rows in the graph."""
    graph = DecoderGraph(Session(counting_graph(tmp_path / "one.onnx", batch="1")))
    with pytest.raises(UsageError, match=r"'input_ids' .*int64\[2, 1\], .*int64\[1, sequence\]"):
        graph.run(np.ones((2, 1), np.int64))


def test_graph_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    """The error names the outputs, or an input that no step can feed."""
    texts = {
        "answers": "m (int64[b, s] input_ids) => (int64[b, s] y) { y = Neg (input_ids) }",
        "takes": "m (int64[b, s, v] input_ids, int64[b, s, v] x) => (int64[b, s, v] logits)"
        "{ logits = Add (input_ids, x) }",
        "classifies": "m (int64[b, s] input_ids) => (int64[b, s] logits) { logits = Neg (input_ids) }",
    }
    errors = []
    for name, text in texts.items():
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
        onnx.save(model, tmp_path / f"{name}.onnx")
        with pytest.raises(InputError) as caught:
            DecoderGraph(Session(tmp_path / f"{name}.onnx"))
        errors.append(caught.value.message)
    assert "input_ids and" in errors[0]
    assert "'x'" in errors[1]
    assert "['b', 's']" in errors[2]


def test_settings_come_from_files_and_user(tmp_path: Path) -> None:
    """A key that only transformers' loop supports is kept for it; a neutral value is ignored."""
    record = {"do_sample": True, "temperature": 0.5, "eos_token_id": [1, 2], "num_beams": 1, "no_repeat_ngram_size": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"text_config": {"n_positions": 30}}', encoding="utf-8")
    settings = read_settings(tmp_path)
    assert ((1, 2), {"no_repeat_ngram_size": 3}) == (settings.eos_token_ids, settings.for_transformers)
    asked = settings.updated(max_new_tokens=None, temperature=None, top_p=0.8, seed=4)
    assert (True, 0.5, 50, 0.8) == (asked.is_sampled, asked.temperature, asked.top_k, asked.top_p)
    greedy = settings.updated(max_new_tokens=7, temperature=0, top_p=None, seed=0)
    assert (False, 7) == (greedy.is_sampled, greedy.max_new_tokens)
    assert 30 == position_limit(tmp_path)


def test_text_stays_within_the_positions_of_the_model() -> None:
    """A default length is shortened; a requested one is refused with the largest that fits."""
    settings = GenerationSettings()
    assert 20 == settings.fitted(10, 30).max_new_tokens
    asked = settings.updated(max_new_tokens=21, temperature=None, top_p=None, seed=0)
    with pytest.raises(UsageError, match=r"31 tokens.*30 positions") as caught:
        asked.fitted(10, 30)
    assert "20 or fewer" in caught.value.hint
    with pytest.raises(UsageError, match=r"30 tokens.*30 positions"):
        settings.fitted(30, 30)
    assert asked == asked.fitted(10, None)


def test_max_length_of_the_files_counts_the_prompt(tmp_path: Path) -> None:
    """``max_new_tokens`` replaces it, and a prompt of that length is refused."""
    file = tmp_path / "generation_config.json"
    file.write_text('{"max_length": 20}')
    settings = read_settings(tmp_path)
    assert 18 == settings.fitted(2, None).max_new_tokens
    assert 8 == settings.fitted(2, 10).max_new_tokens
    stated = settings.updated(max_new_tokens=40, temperature=None, top_p=None, seed=0)
    assert 40 == stated.fitted(2, None).max_new_tokens
    with pytest.raises(UsageError, match=r"max_length .*20"):
        settings.fitted(20, None)
    file.write_text('{"max_length": 20, "max_new_tokens": 5}')
    assert 5 == read_settings(tmp_path).fitted(2, None).max_new_tokens


def test_tokenizer_of_a_file_equals_transformers(tmp_path: Path) -> None:
    """Tokens, text, characters of several tokens and the chat template are equal without transformers."""
    save_tokenizer(tmp_path)
    ours, theirs = read_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "the König was 🦉 not a model"
    tokens = theirs.encode(text)
    assert tokens == ours.encode(text)
    assert theirs.decode(tokens) == "".join(ours.pieces(tokens, after=[]))
    chat = [{"role": "user", "content": PROMPT}]
    rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == chat_prompt(tmp_path, PROMPT)


def test_graph_of_single_token_runs_reads_the_prompt_token_by_token(tmp_path: Path) -> None:
    """Some decoders compute states token by token; the logits are those of the whole prompt."""
    path = counting_graph(tmp_path / "single.onnx", sequence="1", mask="1")
    graph = DecoderGraph(Session(path))
    cache = graph.empty_cache(1)
    assert [[1, 3, 6]] == graph.run(np.array([[1, 2, 3]]), cache=cache).argmax(-1).tolist()
    assert (1, 3) == (graph.length, cache.get_seq_length())
