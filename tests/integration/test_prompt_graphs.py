"""Decoders with a prompt graph beside the step: generation, and quantization on the steps of texts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from e2e.in_process import run_here
from generating import save_decoder
from winml.modelkit import WinMLAutoModel, build_hf_model
from winml.modelkit.builds.config import LoaderSection
from winml.modelkit.builds.manifest_records import BuildResult
from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.models.load_options import declared_options
from winml.modelkit.ort.decoding.decoder import DecoderGraph, rows_of
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.generated_samples import decoding_samples

PROMPT_LENGTH, READ_TOKENS, NEW_TOKENS = 4, 8, 8
TEXTS = tuple(f"{word} was in the model and the {word} had a token" for word in ("king", "queen", "graph", "node"))
TOLERANCE = 1e-4


def _tokens_of_texts(folder: Path) -> torch.Tensor:
    """Return the first tokens of each text, of equal number."""
    tokens = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in TEXTS]
    return torch.tensor([text[: min(map(len, tokens))] for text in tokens])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama that was trained on the texts."""
    folder = save_decoder(tmp_path_factory.mktemp("llama"), num_hidden_layers=2)
    model, tokens = transformers.LlamaForCausalLM.from_pretrained(folder), _tokens_of_texts(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """The decoder in 16-bit activations for an NPU, calibrated on texts."""
    folder = tmp_path_factory.mktemp("built")
    texts = folder / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    quant = {"ep": "qnn", "calibration_data": str(texts)}
    config = {"export": {"ep": "qnn", "verify": False}, "quant": quant}
    return build_hf_model(checkpoint, folder / "built", config=config, precision="w8a16", prompt_length=PROMPT_LENGTH)


def _open_stage(folder: Path, stage: str) -> DecoderGraph:
    """Return the decoder with its prompt graph, as a stage wrote them."""
    prompt, decoder = (Session(folder / f"{stage}_{part}.onnx") for part in ("prompt", "decoder"))
    return DecoderGraph(decoder, prompts=[prompt])


def _share_of_equal_tokens(checkpoint: Path, graph: DecoderGraph) -> float:
    """Return the share of greedy tokens after several prompts that equal PyTorch's after the same tokens."""
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    equal = []
    for prompt in _tokens_of_texts(checkpoint)[:, :READ_TOKENS].tolist():
        with torch.no_grad():
            text = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=None)[0].tolist()
        cache, fed = graph.empty_cache(1), prompt
        for token in text[len(prompt) :]:
            equal.append(int(graph.run(rows_of(fed), cache=cache)[0, -1].argmax()) == token)
            fed = [token]
    return float(np.mean(equal))


def test_prompt_and_step_in_float_return_the_scores_of_pytorch(checkpoint: Path, built: BuildResult) -> None:
    """Runs have several tokens, the first one padded; a second prompt continues from the common cache."""
    graph = _open_stage(built.folder, "export")
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    tokens = torch.arange(3, 25)[None]
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
    cache = graph.empty_cache(1)
    pieces = [(0, 10), (10, 11), (11, 21)]
    answer = np.concatenate([graph.run(tokens[:, start:end].numpy(), cache=cache) for start, end in pieces], axis=1)
    assert np.abs(answer - expected[:, :21]).max() < TOLERANCE * np.abs(expected).max()
    assert graph.held is not None
    with pytest.raises(UsageError, match=rf"{21 + graph.held} tokens.*{graph.held + 1}"):
        graph.run(rows_of([5] * graph.held), cache=cache)
    assert 1.0 == _share_of_equal_tokens(checkpoint, graph)


def test_prompt_is_read_by_the_shortest_graph_that_takes_it(checkpoint: Path, tmp_path: Path) -> None:
    """Graphs of 4 and 8 tokens: a padded run comes first, and after cached tokens runs are full."""
    lengths = (8, 4)
    config = {"export": {"ep": "qnn", "verify": False}}
    result = build_hf_model(checkpoint, tmp_path / "built", config=config, prompt_length=lengths)
    assert ["prompt_4", "prompt_8", "decoder"] == [part.name for part in result.manifest.parts]
    graph = WinMLAutoModel.from_pretrained(tmp_path / "built").graph
    splits = {
        (count, past): [(end - start, used.length) for start, end, used in graph._split_runs(count, past)]
        for count, past in ((1, 0), (3, 0), (5, 0), (8, 0), (11, 0), (7, 8), (13, 8))
    }
    assert {
        (1, 0): [(1, 1)],
        (3, 0): [(3, 4)],
        (5, 0): [(5, 8)],
        (8, 0): [(8, 8)],
        (11, 0): [(3, 4), (8, 8)],
        (7, 8): [(4, 4), (1, 1), (1, 1), (1, 1)],
        (13, 8): [(4, 4), (1, 1), (8, 8)],
    } == splits
    measured = run_here("perf", tmp_path / "built", "--generation", "--iterations", "1", "-f", "json")
    assert 0 == measured.code, measured.err
    assert [16] == [prompt["tokens"] for prompt in json.loads(measured.out)["prompts"]]
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
    cache = graph.empty_cache(1)
    pieces = [(0, 11), (11, 18), (18, 31)]
    answer = np.concatenate([graph.run(tokens[:, start:end].numpy(), cache=cache) for start, end in pieces], axis=1)
    assert np.abs(answer - expected[:, :31]).max() < TOLERANCE * np.abs(expected).max()


def test_prompt_lengths_are_numbers_in_their_range() -> None:
    """Commands take them separated by commas or repeated, configs and Python as one number or a list."""
    read = next(field.read for field in declared_options() if field.name == "prompt_length")
    assert read is not None
    assert (4, 16, 64) == read(("4, 16", "64"))
    for text in ("16,1", "16,", "x", "4.5", str(2**20 + 1)):
        with pytest.raises(UsageError, match="--prompt-length"):
            read((text,))
    assert 4 == LoaderSection(prompt_length=4).prompt_length
    assert (4, 16) == LoaderSection(prompt_length=[4, 16]).prompt_length  # type: ignore[arg-type]  # as JSON has it
    for value in (1, [4, 1]):
        with pytest.raises(ConfigError, match="prompt_length"):
            LoaderSection(prompt_length=value)  # type: ignore[arg-type]  # as above


def test_trained_decoder_in_w8a16_keeps_nine_of_ten_tokens(checkpoint: Path, built: BuildResult) -> None:
    """Both parts are compared together with their float files, in the record of the decoder."""
    assert _share_of_equal_tokens(checkpoint, _open_stage(built.folder, "quantized")) >= 0.9
    stages = [part.stage("quantize") for part in built.manifest.parts]
    assert ["", True] == [stage.together and "SQNR" in stage.together for stage in stages if stage]


def test_prompt_graph_gets_samples_that_fill_its_cache(checkpoint: Path, built: BuildResult) -> None:
    """Quantization needs samples of complete runs, the second of which reads the cache of the first."""
    samples = list(decoding_samples(built.folder / "export_prompt.onnx", checkpoint, {}, 4, seed=0))
    assert [(1, PROMPT_LENGTH)] * 4 == [feeds["input_ids"].shape for feeds in samples]
    assert [False, True, False, True] == [bool(feeds["past_key_values.0.key"].any()) for feeds in samples]
    assert all(feeds["attention_mask"][0, -PROMPT_LENGTH:].all() for feeds in samples)


def test_texts_of_the_user_are_read_by_prompt_and_step(checkpoint: Path, built: BuildResult) -> None:
    """The prompt graph reads a text without padding; its last tokens and 8 more are steps after its cache."""
    texts = [np.arange(2, 16), np.arange(30, 33)]
    files = [built.folder / f"export_{part}.onnx" for part in ("prompt", "decoder")]
    data = [{"input_ids": text[None]} for text in texts]
    prompts, steps = (list(decoding_samples(file, checkpoint, {}, None, 0, data=data)) for file in files)
    read = [feeds["input_ids"][0].tolist() for feeds in prompts]
    assert [[*range(start, start + 4)] for start in (2, 6, 10)] == read
    tokens = [int(feeds["input_ids"][0, 0]) for feeds in steps]
    assert ([*range(8, 16)], [30, 31, 32]) == (tokens[:8], tokens[16:19])
    assert 8 + 8 + 3 + 8 == len(tokens)
    assert 7 == int(next(iter(steps))["attention_mask"].sum())


def test_step_alone_reads_the_start_of_each_text(checkpoint: Path, built: BuildResult, tmp_path: Path) -> None:
    """A step without a prompt graph beside it reads token by token, and continues the text."""
    step = tmp_path / "step.onnx"
    step.write_bytes((built.folder / "export_decoder.onnx").read_bytes())
    samples = decoding_samples(step, checkpoint, {}, None, 0, data=[{"input_ids": np.arange(2, 40)[None]}])
    tokens = [int(feeds["input_ids"][0, 0]) for feeds in samples]
    assert [*range(2, 26)] == list(itertools.islice(tokens, 24))
    assert 32 == len(tokens)
