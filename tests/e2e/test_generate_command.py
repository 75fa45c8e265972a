"""Text of a built decoder, from the command and from Python, compared with PyTorch."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from e2e.in_process import run_here
from encoder_decoder import save_encoder_decoder
from generating import PROMPT, build_decoder, save_decoder
from winml.modelkit import WinMLBuildConfig, WinMLModelForCausalLM, WinMLModelForSeq2SeqLM
from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import SidePair
from winml.modelkit.compare.comparing import at_step
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER
from winml.modelkit.generate.generation.media_prompts import prepare_encoder_decoder
from winml.modelkit.generate.generation.settings import read_settings
from winml.modelkit.generate.generation.transformers_loop import generate_with_loop, model_of_graph
from winml.modelkit.generate.generation.writing import write_texts
from winml.modelkit.metadata_keys import MODEL_KEY
from winml.modelkit.models.caches.layout import loop_cache_name
from winml.modelkit.ort.decoding.inputs import DecoderRun, decoder_feeds
from winml.modelkit.ort.decoding.parts import open_decoder
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.sessions import is_onnxruntime_at_least

TEXTS = [PROMPT, "a node runs on the graph and it had text"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small Llama."""
    return save_decoder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama, built with its cache."""
    return build_decoder(checkpoint, tmp_path_factory.mktemp("built") / "llama")


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama, built without a cache, for one row of a fixed length."""
    return build_decoder(checkpoint, tmp_path_factory.mktemp("plain") / "llama", cache=False)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """The Llama in PyTorch."""
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def batch(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Two rows, the shorter one padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    tokens = tokenizer(TEXTS, return_tensors="pt", padding=True)
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def answer(*arguments: str | Path) -> dict[str, Any]:
    """Run ``winml generate``, and return its JSON."""
    outcome = run_here("generate", *arguments, "-f", "json", "-q")
    assert 0 == outcome.code, outcome.err
    record: dict[str, Any] = json.loads(outcome.out)
    return record


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"repetition_penalty": 1.4}, {"do_sample": True, "top_k": 9}],
    ids=str,
)
def test_generate_writes_the_tokens_of_pytorch(
    built: Path,
    reference: Any,
    batch: dict[str, torch.Tensor],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Transformers' loop runs on a padded batch: greedy, with beams that reorder the cache, and sampled with a seed.

    No name that transformers warns of is used.
    """
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # transformers adds it
    model: Any = WinMLModelForCausalLM.from_pretrained(built)
    written = []
    for each in (model, reference):
        torch.manual_seed(5)
        written.append(each.generate(**batch, max_new_tokens=16, **options))
    torch.testing.assert_close(*written)
    assert "deprecated" not in caplog.text


def test_forward_continues_from_its_cache(built: Path, reference: Any, batch: dict[str, torch.Tensor]) -> None:
    """Prompt and steps are run one by one, then a second text.

    The logits are those of PyTorch, also for a prompt in two pieces.
    """
    model: Any = WinMLModelForCausalLM.from_pretrained(built)
    tokens = batch["input_ids"][1:]
    with torch.no_grad():
        expected = reference(tokens).logits
    whole = model(tokens)
    torch.testing.assert_close(whole.logits[:, -1], expected[:, -1], rtol=0, atol=1e-4)
    first = model(input_ids=tokens[:, :4])
    cache = first[loop_cache_name()]
    with pytest.raises(UsageError, match="two"):
        model(input_ids=tokens[:, 4:], past_key_values=cache, cache=copy.copy(cache))
    second = model(input_ids=tokens[:, 4:], cache=cache)
    torch.testing.assert_close(second.logits, expected[:, 4:], rtol=0, atol=1e-4)
    assert tokens.shape[1] == second[loop_cache_name()].get_seq_length()
    other: Any = WinMLModelForCausalLM.from_pretrained(built)
    with pytest.raises(UsageError, match="only a cache that it returned"):
        other(input_ids=tokens[:, :1], past_key_values=cache)


def test_generate_continues_from_the_cache_of_an_earlier_call(built: Path, batch: dict[str, torch.Tensor]) -> None:
    """Two calls generate the text of one; the second reads only the tokens that the cache lacks."""
    model: Any = WinMLModelForCausalLM.from_pretrained(built)
    tokens, cache = batch["input_ids"][1:], loop_cache_name()

    def written(text: torch.Tensor, count: int, **cached: Any) -> Any:
        counts = {"max_new_tokens": count, "min_new_tokens": count}
        return model.generate(
            text, attention_mask=torch.ones_like(text), return_dict_in_generate=True, **counts, **cached
        )

    first = written(tokens, 4)
    second = written(first.sequences, 4, **{cache: first[cache]})
    torch.testing.assert_close(second.sequences, written(tokens, 8).sequences)


def test_pipeline_takes_a_built_model(built: Path) -> None:
    """The text-generation pipeline of transformers works with the model."""
    model = WinMLModelForCausalLM.from_pretrained(built)
    write = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(built))
    text = write(PROMPT, max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert PROMPT + answer(built, "-p", PROMPT, "--max-new-tokens", "8")["text"] == text


def test_command_and_transformers_loop_write_the_same(built: Path, plain: Path) -> None:
    """Our loop, transformers' loop on the same graph, and a graph without a cache give equal tokens."""
    model: Any = WinMLModelForCausalLM.from_pretrained(built)
    uncached: Any = WinMLModelForCausalLM.from_pretrained(plain)
    record = answer(built, "-p", PROMPT, "--max-new-tokens", "9")
    prompt = torch.tensor([record["prompt_tokens"]])
    expected = model.generate(prompt, max_new_tokens=9)[0, prompt.shape[1] :].tolist()
    assert expected == record["tokens"]
    assert "winml" == record["loop"]
    assert expected == uncached.generate(prompt, max_new_tokens=9)[0, prompt.shape[1] :].tolist()
    without = answer(plain, "-p", PROMPT, "--max-new-tokens", "9")
    assert (expected, None) == (without["tokens"], without["cache_bytes"])
    assert "KV cache" in without["notes"][0]


def test_text_is_streamed_to_stdout_and_notes_to_stderr(built: Path) -> None:
    """The prompt is read from stdin, and stdout has the text alone."""
    outcome = run_here("generate", built, "-p", "-", "--max-new-tokens", "5", stdin=PROMPT)
    assert (0, answer(built, "-p", PROMPT, "--max-new-tokens", "5")["text"] + "\n") == (outcome.code, outcome.out)
    assert "5 new tokens" in outcome.err
    assert "tokens/s" in outcome.err


def test_several_prompts_are_answered_in_order(built: Path) -> None:
    """Each text is that of its prompt alone, and the reference is loaded once for all."""
    other = TEXTS[1]
    alone = [run_here("generate", built, "-p", text, "--max-new-tokens", "6", "-q").out for text in (PROMPT, other)]
    both = run_here("generate", built, "-p", PROMPT, "-p", other, "--max-new-tokens", "6", "--reference")
    assert 0 == both.code, both.err
    assert f"==> {PROMPT} <==\n{alone[0]}==> {other} <==\n{alone[1]}" == both.out
    outcome = run_here("generate", built, "-p", PROMPT, "-p", other, "--max-new-tokens", "6", "--format", "json")
    record = json.loads(outcome.out)
    assert alone == [f"{entry['text']}\n" for entry in record["texts"]]
    assert [PROMPT, other] == [entry["prompt"] for entry in record["texts"]]


def test_chat_and_seed_determine_the_text(built: Path) -> None:
    """A message is inserted into the template. A seed repeats its text, and different seeds give different texts."""
    message = answer(built, "-p", "who", "--chat", "--max-new-tokens", "2")
    assert "<s>user: who\nassistant: " == message["prompt"]
    drawn = [
        answer(built, "-p", PROMPT, "--temperature", "2", "--top-p", "0.9", "--seed", seed, "--max-new-tokens", "12")
        for seed in ("1", "1", "2")
    ]
    assert drawn[0]["tokens"] == drawn[1]["tokens"] != drawn[2]["tokens"]
    assert (True, 2.0, 0.9) == tuple(drawn[0]["settings"][key] for key in ("do_sample", "temperature", "top_p"))


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--num-beams", "3"], {"num_beams": 3}),
        (["--repetition-penalty", "1.4"], {"repetition_penalty": 1.4}),
        (["--num-beams", "2", "--repetition-penalty", "1.4"], {"num_beams": 2, "repetition_penalty": 1.4}),
    ],
    ids=str,
)
def test_options_choose_tokens_as_arguments_of_transformers_do(
    built: Path, reference: Any, options: list[str], arguments: dict[str, Any]
) -> None:
    """Both loops give the tokens of the model in PyTorch."""
    told = answer(built, "-p", PROMPT, "--max-new-tokens", "10", *options)
    prompt = torch.tensor([told["prompt_tokens"]])
    expected = reference.generate(prompt, max_new_tokens=10, do_sample=False, **arguments)[0, prompt.shape[1] :]
    assert expected.tolist() == told["tokens"]
    assert arguments.items() <= told["settings"].items()


def test_few_of_the_likeliest_tokens_are_drawn_from(built: Path) -> None:
    """A draw from one token, or with a minimum share of 1, gives the greedy text."""
    greedy = answer(built, "-p", PROMPT, "--max-new-tokens", "10", "--temperature", "0")
    for option, value in (("--top-k", "1"), ("--min-p", "1")):
        drawn = answer(built, "-p", PROMPT, "--max-new-tokens", "10", option, value, "--seed", "3")
        assert drawn["settings"]["do_sample"]
        assert greedy["tokens"] == drawn["tokens"]


def test_text_ends_at_a_stop_string(built: Path, checkpoint: Path) -> None:
    """The text ends with the token that completes the string, in transformers' loop and in PyTorch."""
    whole = answer(built, "-p", PROMPT, "--max-new-tokens", "10")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    word = tokenizer.decode(whole["tokens"][4:6])
    ended = answer(built, "-p", PROMPT, "--max-new-tokens", "10", "--stop", word, "--reference")
    assert whole["tokens"][: len(ended["tokens"])] == ended["tokens"]
    assert 5 <= len(ended["tokens"]) < 10
    assert word in tokenizer.decode(ended["tokens"])
    assert ended["reference"]["difference"] is None


def test_thread_of_the_loop_ends_with_the_tokens(built: Path) -> None:
    """Tokens of transformers' loop come from a thread, which ends after the last token, and when no more are read.

    A thread that still runs code of torch when Python exits aborts the process.
    """
    settings = read_settings(built).updated(max_new_tokens=40, stop=("never written",))
    model = model_of_graph(open_decoder({DECODER: built / "model.onnx"}, choose_provider(None, None, {}).open), built)
    inputs = {"inputs": torch.tensor([[2, 3, 4]])}
    before = set(threading.enumerate())  # a thread of an earlier test may end meanwhile
    whole = list(generate_with_loop(model, inputs, 3, settings))
    assert before >= set(threading.enumerate())
    some: Any = generate_with_loop(model, inputs, 3, settings)
    assert whole[0].token == next(some).token
    assert set(threading.enumerate()) - before
    some.close()
    assert before >= set(threading.enumerate())


def test_system_message_precedes_the_user_message(built: Path) -> None:
    """The chat template inserts it; without a template the command is refused."""
    message = answer(built, "-p", "who", "--chat", "--system", "be brief", "--max-new-tokens", "2")
    assert "<s>system: be brief\n<s>user: who\nassistant: " == message["prompt"]
    refused = run_here("generate", built, "-p", "who", "--system", "be brief")
    assert 2 == refused.code
    assert "--chat" in refused.err


def test_reference_finds_the_first_token_that_differs(built: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The checkpoint in the metadata gives the same tokens.

    One with another weight does not, and the exit code is 3.
    """
    same = answer(built, "-p", PROMPT, "--max-new-tokens", "10", "--reference")
    assert (same["tokens"], None) == (same["reference"]["tokens"], same["reference"]["difference"])
    other = save_decoder(tmp_path / "other", seed=3)
    outcome = run_here("generate", built, "-p", PROMPT, "--max-new-tokens", "10", "--reference", other, "-f", "json")
    assert 3 == outcome.code
    difference = json.loads(outcome.out)["reference"]["difference"]
    assert difference["token"] != difference["reference_token"]
    assert difference["reference_margin"] > 0
    assert f"PyTorch ({other}) differs at token {difference['index'] + 1}" in outcome.err
    beams = ("--num-beams", "2", "--reference", other, "-f", "json")
    searched = run_here("generate", built, "-p", PROMPT, "--max-new-tokens", "10", *beams)
    assert json.loads(searched.out)["reference"]["difference"]["reference_margin"] is None


def test_text_of_a_different_token_is_its_own(tmp_path: Path) -> None:
    """Tokens before the difference may end inside a character: here each token is a byte."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel

    checkpoint = save_decoder(tmp_path / "bytes", vocab_size=256, seed=0)
    vocabulary = {byte: token for token, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]  # typed as its base
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]  # typed as its base
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    built = build_decoder(checkpoint, tmp_path / "built")
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.018 * torch.randn_like(parameter)
    model.save_pretrained(other)
    outcome = run_here("generate", built, "-p", "é is é", "--max-new-tokens", "12", "--reference", other, "-f", "json")
    record = json.loads(outcome.out)
    difference = record["reference"]["difference"]
    before = record["prompt_tokens"] + record["tokens"][: difference["index"]]
    assert difference["index"] > 0
    assert tokenizer.decode(before).endswith("\ufffd")  # the first byte of a character
    assert 3 == outcome.code
    assert len(difference["text"]) <= 2
    assert len(difference["reference_text"]) <= 2


def test_different_text_of_a_quantized_model_is_a_result(built: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The exit code is 0, and the equal tokens are counted."""
    shutil.copytree(built, tmp_path / "int4")
    model = tmp_path / "int4" / "model.onnx"
    quantized = run_here(
        "quantize", "-m", built / "model.onnx", "-o", model, "--overwrite", "-p", "int4", "--no-verify"
    )
    assert 0 == quantized.code, quantized.err
    other = save_decoder(tmp_path / "other", seed=3)
    outcome = run_here("generate", model, "-p", PROMPT, "--max-new-tokens", "10", "--reference", other, "-f", "json")
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    reference = record["reference"]
    assert reference["is_of_quantized"]
    assert reference["difference"] is not None
    pairs = zip(record["tokens"], reference["tokens"], strict=False)
    assert reference["equal_tokens"] == sum(one == two for one, two in pairs)
    longest = max(len(record["tokens"]), len(reference["tokens"]))
    assert reference["equal_share"] == round(reference["equal_tokens"] / longest, 4)
    assert f"{reference['equal_tokens']} of {longest} tokens" in outcome.err
    assert "error" not in outcome.err


def test_settings_of_transformers_only_use_the_loop_of_transformers(built: Path, tmp_path: Path) -> None:
    """A folder with beams in ``generation_config.json`` gives the tokens of transformers' loop."""
    folder = tmp_path / "beams"
    shutil.copytree(built, folder)
    path = folder / "generation_config.json"
    record = {**json.loads(path.read_text(encoding="utf-8")), "num_beams": 2, "do_sample": False}
    path.write_text(json.dumps(record), encoding="utf-8")
    told = answer(folder, "-p", PROMPT, "--max-new-tokens", "6")
    model: Any = WinMLModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([told["prompt_tokens"]])
    assert model.generate(prompt, max_new_tokens=6)[0, prompt.shape[1] :].tolist() == told["tokens"]
    assert "transformers" == told["loop"]
    assert told["tokens_per_second"] is None


def test_tokenizer_in_other_files_is_read_by_transformers(built: Path, tmp_path: Path) -> None:
    """Older checkpoints have a vocabulary and merges."""
    from tokenizers import Tokenizer

    folder = tmp_path / "older"
    shutil.copytree(built, folder)
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    records = [answer(place, "-p", PROMPT, "--max-new-tokens", "6") for place in (built, folder)]
    assert records[0]["tokens"] == records[1]["tokens"]
    assert records[0]["text"] == records[1]["text"]


def test_first_token_needs_no_torch(built: Path) -> None:
    """Neither torch nor transformers is imported, and neither onnx nor onnx_ir from ONNX Runtime 1.24 on."""
    program = (
        "import sys\nfrom winml.modelkit.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'onnx', 'onnx_ir') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", str(built), "-p", PROMPT, "--max-new-tokens", "3", "-q"],
        capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    expected = [] if is_onnxruntime_at_least("1.24") else ["onnx", "onnx_ir"]
    assert repr(expected) == done.stdout.splitlines()[-1]


def test_checkpoint_is_built_in_the_cache(built: Path, checkpoint: Path, here: Path) -> None:
    """The text is that of the built folder, and the second run finds the build."""
    first, second = (run_here("generate", checkpoint, "the king", "-q") for _ in range(2))
    assert (0, 0) == (first.code, second.code), first.err
    assert run_here("generate", built, "the king", "-q").out == first.out == second.out
    assert [] == [*here.iterdir()]


def test_wrong_requests_are_refused_with_a_remedy(built: Path, tmp_path: Path) -> None:
    """Each request is refused before the model is opened."""
    bare = tmp_path / "bare"
    shutil.copytree(built, bare)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).unlink()
    without_template = tmp_path / "no-template"
    shutil.copytree(built, without_template)
    (without_template / "chat_template.jinja").unlink()
    refusals = {
        ": no tokenizer": [bare, "-p", "x"],
        ": no chat template": [without_template, "-p", "x", "--chat"],
        "but the model has 64 positions": [built, "-p", "x", "--max-new-tokens", "64"],
        "the text is empty": [built, "-p", ""],
        "--reference compares token by token": [built, "-p", "x", "--temperature", "1", "--reference"],
        "no such execution provider": [built, "-p", "x", "--ep", "nope"],
    }
    outcomes = {words: run_here("generate", *arguments) for words, arguments in refusals.items()}
    for words, outcome in outcomes.items():
        assert words in outcome.err
        assert (1 if "tokenizer" in words else 2, "") == (outcome.code, outcome.out)


def test_model_that_does_not_generate_is_refused(small_file: Path, built: Path, tmp_path: Path) -> None:
    """The model is an encoder with a tokenizer beside it."""
    shutil.copy(small_file, tmp_path / "encoder.onnx")
    shutil.copy(built / "tokenizer.json", tmp_path)
    outcome = run_here("generate", tmp_path / "encoder.onnx", "-p", "x")
    assert 1 == outcome.code
    assert "not generate" in outcome.err


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_model_of_another_task_is_refused(has_tokenizer: bool, plain: Path, tmp_path: Path) -> None:
    """The scores belong to the text itself, even if there is one for each token."""
    folder = shutil.copytree(plain, tmp_path / "built")
    model = onnx.load(folder / "model.onnx")
    onnx.helper.set_model_props(model, {MODEL_KEY: json.dumps({"task": "fill-mask"})})
    onnx.save(model, folder / "model.onnx")
    if not has_tokenizer:
        (folder / "tokenizer.json").unlink()
    outcome = run_here("generate", folder, "-p", "x")
    assert 2 == outcome.code
    assert "winml run" in outcome.err


def test_perf_measures_prompts_and_steps(built: Path, plain: Path) -> None:
    """The lengths fit the positions; the cache has keys and values of two heads of eight numbers in two layers."""
    outcome = run_here("perf", built, "--generation", "--iterations", "2", "-f", "json")
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    assert [(16, 16 * 256)] == [(entry["tokens"], entry["cache_bytes"]) for entry in record["prompts"]]
    assert ([16], 256) == ([step["cached_tokens"] for step in record["steps"]], record["cache_bytes_per_token"])
    assert all(step["tokens_per_second"] == pytest.approx(1000 / step["step_ms"]) for step in record["steps"])
    refused = run_here("perf", plain, "--generation")
    assert (2, True) == (refused.code, "has no KV cache" in refused.err)
    both = run_here("perf", built, "--generation", "--by-module")
    assert (2, True) == (both.code, "--by-module" in both.err)


def test_perf_by_module_separates_prompt_and_step(built: Path, tmp_path: Path) -> None:
    """The JSON has both, the page a chart for each, and the trace a process for each."""
    page, trace, nodes = tmp_path / "time.html", tmp_path / "trace.json", tmp_path / "nodes.json"
    files = ("--report", page, "--trace", trace, "--node-data", nodes)
    outcome = run_here("perf", built, "--by-module", "--iterations", "2", *files, "-f", "json")
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    runs = {name: record[name]["benchmark_info"]["decoding"] for name in ("prompt", "step")}
    assert {"prompt": {"tokens": 63, "cached": 0}, "step": {"tokens": 1, "cached": 63}} == runs
    shapes = {name: record[name]["model_info"]["measured_shapes"] for name in runs}
    assert [[1, 63], [1, 1]] == [shapes[name]["input_ids"] for name in runs]
    assert [[1, 2, 0, 8], [1, 2, 63, 8]] == [shapes[name]["past_key_values.0.key"] for name in runs]
    for name in runs:
        by_module = record[name]["by_module"]
        assert ("LlamaForCausalLM", 0) == (by_module["tree"][0]["class"], by_module["unattributed_share"])
        assert by_module["kernel_ms"] == pytest.approx(by_module["tree"][0]["total_ms"])
    text = page.read_text(encoding="utf-8")
    assert ["a prompt of 63 tokens", "1 token after 63"] == re.findall("<h3>(.*?)</h3>", text)
    assert {1, 2} == {event["pid"] for event in json.loads(trace.read_bytes())["traceEvents"]}
    assert nodes.is_file()


def test_perf_by_class_of_a_decoder_measures_a_step(built: Path) -> None:
    """All layers of a class are summed, for a prompt and for a step."""
    classes = run_here("perf", built, "--by-module", "--iterations", "2", "--group", "class", "--top", "2")
    assert 0 == classes.code, classes.err
    assert "a step" in classes.out


def test_perf_of_a_decoder_measures_a_step(built: Path) -> None:
    """A step is the default; a length beyond the positions is refused, and both sizes give one run."""
    outcome = run_here("perf", built, "--iterations", "2", "--warmup", "1")
    assert 0 == outcome.code, outcome.err
    assert "1 token after 63" in outcome.out
    assert "--generation" in outcome.out
    refused = run_here("perf", built, "--by-module", "--shape-config", '{"past_sequence": 64}')
    assert (2, True) == (refused.code, "the model has 64 positions" in refused.err)
    sizes = '{"sequence": 3, "past_sequence": 4}'
    one = run_here("perf", built, "--by-module", "--iterations", "2", "--shape-config", sizes, "-f", "json")
    assert [1, 7] == json.loads(one.out)["model_info"]["measured_shapes"]["attention_mask"]


def test_step_of_a_comparison_equals_the_step_of_the_reference(built: Path, reference: Any) -> None:
    """The step has the token that PyTorch generates after the tokens in the cache."""
    side = OnnxSide(built / "model.onnx", by_module=False)
    inputs = graph_inputs(side.session())
    prompt, _ = decoder_feeds(inputs, DecoderRun(6, 0), {}, batch_size=2, seed=3)
    (feeds,) = at_step(SidePair(side, side, [prompt]), 5).draws
    tokens = torch.from_numpy(prompt["input_ids"])
    written = reference.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert written[:, 10].tolist() == feeds["input_ids"][:, 0].tolist()
    assert [(2, 2, 10, 8), (2, 11), [[10], [10]]] == [
        feeds["past_key_values.1.value"].shape,
        feeds["attention_mask"].shape,
        feeds["position_ids"].tolist(),
    ]


def test_step_needs_token_ids_and_scores(built: Path, tmp_path: Path) -> None:
    """A decoder with another name of the input or output is refused before a run."""
    for old, new in (("input_ids", "decoder_input_ids"), ("logits", "scores")):
        model = onnx.load(built / "model.onnx")
        for value in (*model.graph.input, *model.graph.output):
            value.name = new if value.name == old else value.name
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
        onnx.save(model, tmp_path / "other.onnx")
        other = tmp_path / "other.onnx"
        outcome = run_here("compare", other, other, "--step", "2")
        assert (2, True) == (outcome.code, f"{old!r}" in outcome.err), outcome.err


def test_compare_names_the_first_wrong_module_at_a_step(built: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A file with one scaled weight is compared with the checkpoint; a step beyond the positions is refused."""
    model = onnx.load(built / "model.onnx")
    weight = next(tensor for tensor in model.graph.initializer if "layers.1.mlp.up_proj" in tensor.name)
    values = onnx.numpy_helper.to_array(weight) * np.float32(1.1)
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    arguments = ("compare", checkpoint, tmp_path / "wrong.onnx", "--by-module")
    outcome = run_here(*arguments, "--step", "4", "-f", "json")
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    assert (4, "model.layers.1.mlp") == (record["step"], record["first_divergence"]["module"])
    refused = run_here(*arguments, "--step", "60", "--shape-config", '{"sequence": 5}')
    assert (2, True) == (refused.code, "the text has 65 tokens, but the model has 64 positions" in refused.err)


def test_compare_at_a_step_needs_a_cache(plain: Path) -> None:
    """A graph without a cache has no steps."""
    outcome = run_here("compare", plain, plain, "--step", "2")
    assert (2, True) == (outcome.code, "--step 2: the model has no KV cache" in outcome.err)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small T5, built as encoder and decoder."""
    checkpoint = save_encoder_decoder(tmp_path_factory.mktemp("t5") / "checkpoint", "t5")
    return build_decoder(checkpoint, tmp_path_factory.mktemp("built") / "t5")


def test_encoder_decoder_generates_the_text_of_pytorch(translator: Path) -> None:
    """The command uses our own loop, Python that of transformers; the folder names its source."""
    record = answer(translator, "-p", PROMPT, "--max-new-tokens", "8", "--reference")
    assert "winml" == record["loop"]
    assert record["tokens"] == record["reference"]["tokens"]
    assert record["reference"]["difference"] is None
    model: Any = WinMLModelForSeq2SeqLM.from_pretrained(translator)
    assert isinstance(model, WinMLModelForSeq2SeqLM)
    tokens = model.generate(torch.tensor([record["prompt_tokens"]]), max_new_tokens=8)
    assert record["tokens"] == tokens[0, 1:].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--audio", "a.wav"], "input_ids, attention_mask"),
        (["-p", "a", "--chat"], "--chat:"),
        ([], "no prompt"),
    ],
)
def test_encoder_decoder_refuses_unread_inputs_of_its_encoder(
    translator: Path, arguments: list[str], message: str
) -> None:
    """The message lists the inputs of the encoder, before a graph is opened."""
    outcome = run_here("generate", translator, *arguments)
    assert 2 == outcome.code
    assert message in outcome.err


def test_run_cuts_a_text_to_the_fixed_length_of_an_encoder(tmp_path: Path) -> None:
    """A note names the length and the option for a dynamic one; a shorter text is padded."""
    checkpoint = save_encoder_decoder(tmp_path / "checkpoint", "t5")
    folder = tmp_path / "built"
    sizes = ("--shape-config", '{"sequence_length": 6}', "--no-verify")
    assert 0 == run_here("build", "-m", checkpoint, "-o", folder, *sizes).code
    long, short = (run_here("run", folder, "--text", text, "-f", "json") for text in (" ".join([PROMPT] * 9), "a"))
    assert [0, 0] == [long.code, short.code], long.err + short.err
    (note,) = json.loads(long.out)["notes"]
    assert " 6 " in note.replace(",", " ")
    assert "--dynamic-seq-len" in note
    assert [] == json.loads(short.out)["notes"]


def test_perf_measures_the_parts_of_a_folder(translator: Path) -> None:
    """Each part is measured.

    With --generation, the text up to the first token, and steps by the length of the cache.
    """
    runs = ("--iterations", "2", "--warmup", "0", "--format", "json", "-q")
    outcome = run_here("perf", translator, *runs)
    assert 0 == outcome.code, outcome.err
    parts = json.loads(outcome.out)["parts"]
    assert ["encoder", "decoder"] == list(parts)
    assert all(Path(part["benchmark_info"]["model"]).name == f"{name}.onnx" for name, part in parts.items())
    outcome = run_here("perf", translator, *runs, "--generation")
    assert 0 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    assert [1] == [prompt["tokens"] for prompt in record["prompts"]]
    assert [16, 64] == [step["cached_tokens"] for step in record["steps"]][:2]
    outcome = run_here("perf", translator, "--by-module")
    assert 2 == outcome.code
    assert "--by-module" in outcome.err
    assert "--submodel encoder" in outcome.err


def test_recording_is_written_down(tmp_path: Path) -> None:
    """The feature extractor beside the model prepares the recording."""
    soundfile = pytest.importorskip("soundfile")
    checkpoint = save_encoder_decoder(tmp_path / "checkpoint", "whisper")
    config = WinMLBuildConfig.model_validate({"export": {"exporter": "torchscript"}})
    built = build_decoder(checkpoint, tmp_path / "built", config=config)
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(12_000) / 9, dtype=np.float32), 12_000)
    record = answer(built, "--audio", str(tmp_path / "a.wav"), "--max-new-tokens", "6")
    assert 6 == len(record["tokens"])
    # The recording is read once: the prepared inputs need no file.
    once = tmp_path / "once.wav"
    soundfile.write(once, np.sin(np.arange(12_000) / 9, dtype=np.float32), 12_000)
    files = {name: Path(built) / f"{name}.onnx" for name in ("encoder", "decoder")}
    asked = {"max_new_tokens": 6, "temperature": None, "top_p": None, "seed": 0}
    prepared = prepare_encoder_decoder(files, {"audio": str(once)}, **asked)
    once.unlink()
    provider = choose_provider(None, None, {})
    (written,) = write_texts([prepared], provider, threads=None, show=lambda _piece: None, adapter=None)
    assert record["tokens"] == list(written.tokens)
    assert "--audio" in run_here("generate", built, "-p", "a").err
    times = ["--audio", str(tmp_path / "a.wav"), "--timestamps"]
    assert "timestamps_token_id" in run_here("generate", built, *times).err
    assert "--timestamps" in run_here("generate", built, "-p", "a", "--timestamps").err
    processor = Path(built) / "preprocessor_config.json"
    whole_processor = {"feature_extractor": json.loads(processor.read_text(encoding="utf-8"))}
    (Path(built) / "processor_config.json").write_text(json.dumps(whole_processor), encoding="utf-8")
    processor.unlink()  # as transformers 5 saves it
    for count, words in ((40_000, "is longer than 1 s"), (0, "contains no samples")):
        soundfile.write(tmp_path / "b.wav", np.zeros(count, np.float32), 16_000)
        assert words in run_here("generate", built, "--audio", str(tmp_path / "b.wav")).err

    # A recording longer than the encoder's second gives the text of transformers' long-form loop.
    told = {"decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "no_timestamps_token_id": 60}
    for folder in (checkpoint, Path(built)):
        (folder / "generation_config.json").write_text(json.dumps(told), encoding="utf-8")
    sound = np.random.default_rng(0).standard_normal(40_000).astype(np.float32) / 4
    soundfile.write(tmp_path / "a.wav", sound, 16_000, subtype="FLOAT")
    record = answer(built, *times, "--max-new-tokens", "8")
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint)
    given = extractor(
        sound, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest",
        return_attention_mask=True,
    )  # fmt: skip
    reference: Any = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    expected = reference.generate(**given, return_timestamps=True, return_segments=True, max_new_tokens=8)
    assert expected["sequences"][0].tolist() == record["tokens"]
    spoken = [(float(item["start"]), float(item["end"])) for item in expected["segments"][0]]
    assert spoken == [(item["start_s"], item["end_s"]) for item in record["segments"]]
    assert 1 < spoken[-1][1]
    assert f"[{spoken[0][0]:.2f} → {spoken[0][1]:.2f}] {record['segments'][0]['text']}\n" in record["text"]
    whole = answer(built, *times[:2], "--max-new-tokens", "8")
    assert (record["tokens"], None) == (whole["tokens"], whole["segments"])
