"""Folders in the layouts of other tools, opened unchanged by these tools with equal results.

Each reader runs in its own environment, which `make readers` installs: these tools need other versions of transformers
or onnxruntime, or node.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import soundfile
import torch
import transformers
import yaml
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    CLIPImageProcessor,
    GenerationMixin,
)

from browser import WEBGPU, Browser, opened_browser, served
from checkpoints import TEXT, make_distinct, save_checkpoint, save_sam
from e2e.in_process import run_here
from e2e.workplace import Outcome
from encoder_decoder import save_encoder_decoder
from generating import PROMPT, build_decoder, counting_graph, save_decoder, save_tokenizer
from readers import BROWSERS, REPOSITORY, find_program, folder_of, python_of
from vision_language import (
    genai_processor,
    save_image,
    save_vision_language,
    save_with_genai_marks,
    vision_language_processor,
)
from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.builds.layouts.foundry import foundry_record
from winml.modelkit.builds.manifest_records import read_manifest
from winml.modelkit.builds.model_card import CardFacts, model_card
from winml.modelkit.words import size_words

NEW_TOKENS = 12
PROGRAMS = {
    "genai": """
import json, sys, onnxruntime_genai as og
model = og.Model(sys.argv[1])
tokens = og.Tokenizer(model).encode(sys.argv[2])
options = og.GeneratorParams(model)
options.set_search_options(do_sample=False, max_length=len(tokens) + int(sys.argv[3]))
generator = og.Generator(model, options)
generator.append_tokens(tokens)
written = []
while not generator.is_done():
    generator.generate_next_token()
    written.append(int(generator.get_next_tokens()[0]))
print(json.dumps(written))
""",
    "optimum": """
import json, sys
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer
tokens = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")["input_ids"]
model = ORTModelForCausalLM.from_pretrained(sys.argv[1])
print(json.dumps(model.generate(tokens, max_new_tokens=int(sys.argv[3]))[0, tokens.shape[1]:].tolist()))
""",
    "transformers.js": """
import { AutoModelForCausalLM, AutoTokenizer, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
const [folder, text, count] = process.argv.slice(-3);
const tokens = (await AutoTokenizer.from_pretrained(folder))(text);
const model = await AutoModelForCausalLM.from_pretrained(folder, { dtype: 'fp32' });
const all = await model.generate({ ...tokens, max_new_tokens: Number(count), do_sample: false });
console.log(JSON.stringify(all.tolist()[0].slice(tokens.input_ids.dims[1]).map(Number)));
""",
}
ON_WEBGPU = """
import onnxruntime_ep_webgpu, onnxruntime_genai
onnxruntime_genai.register_execution_provider_library(
    "WebGpuExecutionProvider", onnxruntime_ep_webgpu.get_library_path()
)
"""
SEEN = """
import { readFileSync } from 'node:fs';
import { AutoModelForImageTextToText, Tensor, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
const [folder, file, count] = process.argv.slice(-3);
const tensor = ([type, dims, data]) =>
  new Tensor(type, type === 'int64' ? BigInt64Array.from(data, BigInt) : Float32Array.from(data), dims);
const made = Object.entries(JSON.parse(readFileSync(file))).map(([name, value]) => [name, tensor(value)]);
const inputs = Object.fromEntries(made);
const model = await AutoModelForImageTextToText.from_pretrained(folder, { dtype: 'fp32' });
const length = { max_new_tokens: Number(count), min_new_tokens: Number(count) };
const settings = { ...length, no_repeat_ngram_size: 1, do_sample: false };
const all = await model.generate({ ...inputs, ...settings });
console.log(JSON.stringify(all.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number)));
"""
MASKS = """
import { readFileSync } from 'node:fs';
import { AutoModel, Tensor, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
const [folder, file] = process.argv.slice(-2);
const tensor = ([dims, data]) => new Tensor('float32', Float32Array.from(data), dims);
const { pixels, points } = JSON.parse(readFileSync(file));
const model = await AutoModel.from_pretrained(folder, { dtype: 'fp32' });
const found = await model({ pixel_values: tensor(pixels), input_points: tensor(points) });
console.log(JSON.stringify([found.iou_scores, found.pred_masks].map(({ dims, data }) => [dims, [...data]])));
"""
SCORED = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.onnxruntime_genai import ONNXRuntimeGenAILM
from lm_eval.models.onnxruntime_ort import ONNXRuntimeLM
model = {"onnxruntime": ONNXRuntimeLM, "onnxruntime-genai": ONNXRuntimeGenAILM}[sys.argv[2]](pretrained=sys.argv[1])
requests = [Instance("loglikelihood", {}, tuple(pair), 0) for pair in json.loads(sys.argv[3])]
print(json.dumps([float(score) for score, is_greedy in model.loglikelihood(requests)]))
"""
"""Backends of lm-eval: log-likelihoods of continuations."""
WITHOUT_SYSTEM = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}
"""
"""Chat template that refuses messages in the role ``system``."""
SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
"""Driver of WebGPU in software, which Debian's package chromium contains; it has no 16-bit floats."""
ENCODED_PROGRAMS = {
    "optimum": """
import json, sys
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import AutoTokenizer
given = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")
model = ORTModelForSeq2SeqLM.from_pretrained(sys.argv[1])
asked = {"max_new_tokens": int(sys.argv[3]), "no_repeat_ngram_size": 1}
print(json.dumps(model.generate(given["input_ids"], attention_mask=given["attention_mask"], **asked)[0].tolist()))
""",
    "transformers.js": """
import { AutoModelForSeq2SeqLM, AutoTokenizer, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
const [folder, text, count] = process.argv.slice(-3);
const tokens = (await AutoTokenizer.from_pretrained(folder))(text);
const model = await AutoModelForSeq2SeqLM.from_pretrained(folder, { dtype: 'fp32' });
const asked = { max_new_tokens: Number(count), no_repeat_ngram_size: 1, do_sample: false };
console.log(JSON.stringify((await model.generate({ ...tokens, ...asked })).tolist()[0].map(Number)));
""",
}
HEARD = """
import json, sys, numpy as np, onnxruntime_genai as og
folder, recording, features, tokens, count = sys.argv[1:]
model = og.Model(folder)
made = model.create_multimodal_processor()([""], audios=og.Audios.open(recording))["audio_features"].as_numpy()
given, start = np.load(features), json.loads(tokens)
options = og.GeneratorParams(model)
options.set_search_options(do_sample=False, max_length=len(start) + int(count), batch_size=len(given))
generator = og.Generator(model, options)
inputs = og.NamedTensors()
inputs["audio_features"] = given
generator.set_inputs(inputs)
generator.append_tokens(np.array([start] * len(given), np.int32))
written = []
while not generator.is_done():
    generator.generate_next_token()
    written.append(generator.get_next_tokens().tolist())
print(json.dumps([made.tolist(), np.transpose(written).tolist()]))
"""
SEEN_BY_GENAI = """
import json, sys, numpy as np, onnxruntime_genai as og
folder, text, image, count = sys.argv[1:]
model = og.Model(folder)
processor = model.create_multimodal_processor()
made = processor(text, images=og.Images.open(image)) if image else processor(text)
tokens = made["input_ids"].as_numpy()
options, length = og.GeneratorParams(model), tokens.shape[1] + int(count)
options.set_search_options(do_sample=False, max_length=length, min_length=length, no_repeat_ngram_size=1)
generator = og.Generator(model, options)
generator.set_inputs(made)
scores, written = np.ravel(generator.get_logits()), []
while not generator.is_done():
    generator.generate_next_token()
    written += generator.get_next_tokens().tolist()
pixels = made["pixel_values"].as_numpy().tolist() if image else []
print(json.dumps([tokens.tolist(), pixels, scores.tolist(), written]))
"""
ROWS_OF_TOKENS = """
import json, sys, numpy as np, onnxruntime_genai as og
folder, rows, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
longest = max(map(len, rows))
model = og.Model(folder)
options = og.GeneratorParams(model)
length = longest + count
options.set_search_options(do_sample=False, batch_size=len(rows), max_length=length, min_length=length)
generator = og.Generator(model, options)
generator.append_tokens(np.array([row + [1] * (longest - len(row)) for row in rows], np.int32))
written = []
while not generator.is_done():
    generator.generate_next_token()
    written.append(generator.get_next_tokens().tolist())
print(json.dumps(np.transpose(written).tolist()))
"""
FETCHED = """
import { ModelRegistry, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
console.log(JSON.stringify(await ModelRegistry.get_model_files(process.argv.at(-1), { dtype: 'fp32' })));
"""
LOGITS = """
import { AutoModelForSequenceClassification, AutoTokenizer, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
const [folder, text, ...dtypes] = process.argv.slice(1);
const tokens = (await AutoTokenizer.from_pretrained(folder))(text);
const found = {};
for (const dtype of dtypes) {
    const model = await AutoModelForSequenceClassification.from_pretrained(folder, { dtype });
    found[dtype] = (await model(tokens)).logits.to('float32').tolist()[0];
}
console.log(JSON.stringify(found));
"""
SPECIAL_TOKENS = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps([tokenizer.additional_special_tokens, tokenizer(sys.argv[2])["input_ids"]]))
"""
SENTENCE_VECTORS = """
import json, sys
from sentence_transformers import SentenceTransformer
print(json.dumps(SentenceTransformer(sys.argv[1], backend="onnx", device="cpu").encode(sys.argv[2:]).tolist()))
"""
VECTORS = """
import { pipeline, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
const [folder, text] = process.argv.slice(-2);
const extract = await pipeline('feature-extraction', folder, { dtype: 'fp32' });
console.log(JSON.stringify((await extract(text)).tolist()));
"""
IN_BROWSER = """<!doctype html><link rel="icon" href="data:,"><script type="module">
import { AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, env } from './transformers.min.js';
env.allowLocalModels = true;
env.allowRemoteModels = false;
env.localModelPath = './';
env.backends.onnx.wasm.wasmPaths = './';
window.write = async (folder, dtype, device, text, count) => {
    const tokens = (await AutoTokenizer.from_pretrained(folder))(text);
    const model = await AutoModelForCausalLM.from_pretrained(folder, { dtype, device });
    const all = await model.generate({ ...tokens, max_new_tokens: count, do_sample: false });
    return all.tolist()[0].slice(tokens.input_ids.dims[1]).map(Number);
};
window.classify = async (folder, dtype, device, text) => {
    const tokens = (await AutoTokenizer.from_pretrained(folder))(text);
    const model = await AutoModelForSequenceClassification.from_pretrained(folder, { dtype, device });
    return (await model(tokens)).logits.tolist()[0];
};
</script>"""
LABELS = ("king", "a queen text")
LABELED = {
    "optimum": """
import json, sys, numpy as np, torch
from optimum.onnxruntime import ORTModelForZeroShotImageClassification
from transformers import AutoTokenizer
folder, _, pixels, *labels = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(folder)(labels, padding=True, return_tensors="pt")
model = ORTModelForZeroShotImageClassification.from_pretrained(folder)
asked = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
scores = model(pixel_values=torch.from_numpy(np.load(pixels)), **asked).logits_per_image.softmax(-1)
print(json.dumps(dict(zip(labels, scores[0].tolist()))))
""",
    "transformers.js": """
import { pipeline, env } from '@huggingface/transformers';
env.allowRemoteModels = false;
env.localModelPath = '';
const [folder, picture, pixels, ...labels] = process.argv.slice(1);
const classify = await pipeline('zero-shot-image-classification', folder, { dtype: 'fp32' });
const found = await classify(picture, labels, { hypothesis_template: '{}' });
console.log(JSON.stringify(Object.fromEntries(found.map(({ label, score }) => [label, score]))));
""",
}


def read_with(layout: str, program: str, *arguments: str | Path) -> Any:
    """Run a program in the environment of a reader and parse its last line as JSON."""
    return json.loads(run_code(layout, program, *arguments).splitlines()[-1])


def run_code(layout: str, program: str, *arguments: str | Path) -> str:
    """Run a program in the environment of a reader and return its output."""
    if layout == "transformers.js":
        command, folder = ["node", "--input-type=module", "-e", program, "--"], folder_of(layout)
    else:
        command, folder = [str(python_of(layout)), "-c", program], Path.cwd()
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return save_decoder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with one layer, for tests with several builds."""
    return save_decoder(tmp_path_factory.mktemp("shallow"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama with its cache, built without a layout."""
    return build_decoder(checkpoint, tmp_path_factory.mktemp("built") / "llama")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    """The tokens that PyTorch generates after the prompt."""
    tokens = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    written: list[int] = model.generate(tokens, max_new_tokens=NEW_TOKENS)[0, tokens.shape[1] :].tolist()
    return written


def laid_out(model: Path, folder: Path, layout: str, *options: str) -> Path:
    """Build an ONNX file into a layout and return the folder."""
    outcome = run_here("build", "-m", model, "-o", folder, "--layout", layout, "-q", *options)
    assert 0 == outcome.code, outcome.err
    return folder


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.reader(layout)) for layout in PROGRAMS])
def test_layout_reader_generates_the_text_of_pytorch(
    built: Path, expected: list[int], tmp_path: Path, layout: str
) -> None:
    """The reader uses tokenizer, config and cached graph of the unchanged folder."""
    folder = laid_out(built / "model.onnx", tmp_path / "folder", layout)
    assert expected == read_with(layout, PROGRAMS[layout], folder, PROMPT, str(NEW_TOKENS))


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.reader(layout)) for layout in PROGRAMS])
def test_last_lines_of_the_summary_generate_text(built: Path, tmp_path: Path, layout: str) -> None:
    """The code runs unchanged in the runtime of the layout."""
    outcome = run_here("build", built / "model.onnx", "-o", tmp_path / "folder", "--layout", layout)
    assert 0 == outcome.code, outcome.err
    lines = outcome.out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("use "))
    indent = len(lines[first]) - len(lines[first].removeprefix("use").lstrip())
    code = "\n".join(line[indent:] for line in lines[first:])
    assert run_code(layout, code).strip()


@pytest.mark.reader("transformers.js")
def test_reader_of_4_bit_weights_generates_the_text_of_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    """The empty cache has the rows named by its dimensions: the fused attention accepts no others."""
    source = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    model: Any = AutoModelForCausalLM.from_pretrained(source).eval()
    _fill_with_4_bits(model)
    model.save_pretrained(source)
    tokens = AutoTokenizer.from_pretrained(source)(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(tokens, max_new_tokens=NEW_TOKENS)[0, tokens.shape[1] :].tolist()
    folder = laid_out(source, tmp_path / "folder", "transformers.js", "--precision", "int4", "--no-verify")
    operators = {node.op_type for node in onnx.load(folder / "onnx" / "model_q4.onnx").graph.node}
    assert {"GroupQueryAttention", "MatMulNBits"} <= operators
    program = PROGRAMS["transformers.js"].replace("'fp32'", "'q4'")
    assert expected == read_with("transformers.js", program, folder, PROMPT, str(NEW_TOKENS))
    assert len(set(expected)) > NEW_TOKENS // 2


@pytest.mark.reader("genai")
def test_genai_generates_the_text_of_pytorch_for_unequal_rows(tmp_path: Path) -> None:
    """The reader pads on the right, so that the cache contains padding, which sliding windows do not count."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **{**TEXT, "num_attention_heads": 2}, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model: Any = transformers.Gemma3ForCausalLM(config)
    make_distinct(model)
    model.eval().save_pretrained(tmp_path / "checkpoint")
    save_tokenizer(tmp_path / "checkpoint")
    rows = [[5, 9, 33, 7, 8, 40, 41, 42, 50, 51, 52, 53], [3, 7, 44, 22, 60, 61, 62]]
    asked = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = [model.generate(torch.tensor([row]), **asked)[0, len(row) :].tolist() for row in rows]
    folder = laid_out(tmp_path / "checkpoint", tmp_path / "folder", "genai")
    assert expected == read_with("genai", ROWS_OF_TOKENS, folder, json.dumps(rows), str(NEW_TOKENS))
    assert len(set(expected[1])) > NEW_TOKENS // 2


def _fill_with_4_bits(model: Any) -> None:
    """Give every 16 weights of a row all 4-bit values, and each token another next token."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            levels = torch.rand(weight.numel() // 16, 16, generator=generator).argsort(-1).reshape(weight.shape) - 8
            # The layers add little to the token's own vector, so that the scores of two tokens are far apart.
            weight.data.copy_(levels * 2.0 ** (-8 if name.endswith(("o_proj.weight", "down_proj.weight")) else -5))
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data.roll(7, 0))


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=pytest.mark.reader(layout)) for layout in ENCODED_PROGRAMS]
)
def test_reader_of_an_encoder_decoder_generates_the_text_of_pytorch(tmp_path: Path, layout: str) -> None:
    """The decoder computes the encoder's keys and values in the first run, and takes them in later runs."""
    checkpoint = save_encoder_decoder(tmp_path / "checkpoint", "t5")
    given = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    asked = {"max_new_tokens": NEW_TOKENS, "no_repeat_ngram_size": 1}
    expected = model.generate(given["input_ids"], attention_mask=given["attention_mask"], **asked)[0].tolist()
    folder = laid_out(checkpoint, tmp_path / "folder", layout, "--no-verify")
    assert expected == read_with(layout, ENCODED_PROGRAMS[layout], folder, PROMPT, str(NEW_TOKENS))
    assert len(set(expected)) > NEW_TOKENS // 2


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small CLIP with its tokenizer and image processor."""
    folder = save_checkpoint("clip", tmp_path_factory.mktemp("clip") / "checkpoint")
    save_tokenizer(folder)
    edges = {"height": 32, "width": 32}
    CLIPImageProcessor(size=edges, crop_size=edges, do_center_crop=False).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.reader(layout)) for layout in LABELED])
def test_reader_scores_one_image_with_several_labels(clip: Path, tmp_path: Path, layout: str) -> None:
    """Texts and images have separate counts; each label has PyTorch's probability."""
    folder = laid_out(clip, tmp_path / "folder", layout, "--no-verify")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8))
    picture.save(tmp_path / "picture.png")
    pixels = AutoImageProcessor.from_pretrained(clip)(picture, return_tensors="np")["pixel_values"]
    np.save(tmp_path / "pixels.npy", pixels)
    tokenizer, model = AutoTokenizer.from_pretrained(clip), AutoModel.from_pretrained(clip).eval()
    tokens = tokenizer(list(LABELS), padding=True, return_tensors="pt")
    asked = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        scores = model(pixel_values=torch.from_numpy(pixels), **asked).logits_per_image.softmax(-1)[0]
    found = read_with(layout, LABELED[layout], folder, tmp_path / "picture.png", tmp_path / "pixels.npy", *LABELS)
    np.testing.assert_allclose([found[label] for label in LABELS], scores.numpy(), rtol=0, atol=1e-4)


@pytest.mark.reader("optimum")
def test_optimum_knows_the_special_tokens_that_a_newer_transformers_lists(bert: Path, tmp_path: Path) -> None:
    """Each special token is one token, in the list format of the version that optimum pins."""
    source = shutil.copytree(bert, tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<here>", "<there>"]})
    tokenizer.save_pretrained(source)
    config = json.loads((source / "tokenizer_config.json").read_bytes())
    assert ["<here>", "<there>"] == config["extra_special_tokens"]
    folder = laid_out(source, tmp_path / "folder", "optimum", "--no-verify")
    text = "a <here> king <there>"
    assert [["<here>", "<there>"], tokenizer(text)["input_ids"]] == read_with("optimum", SPECIAL_TOKENS, folder, text)
    here = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == here(text)["input_ids"]


@pytest.mark.reader("genai")
def test_genai_takes_a_cache_in_8_bits(tmp_path: Path) -> None:
    """The reader allocates the 8-bit cache, and generates the tokens that winml generates with the file."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    checkpoint = save_decoder(tmp_path / "checkpoint", "llama", **sizes)
    folder = laid_out(checkpoint, tmp_path / "folder", "genai", "--no-verify", "--kv-cache", "int8")
    assert json.loads((folder / "genai_config.json").read_bytes())["search"]["past_present_share_buffer"]
    outcome = run_here("generate", folder, "-p", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--format", "json")
    tokens = json.loads(outcome.out)["tokens"]
    rows = [json.loads(outcome.out)["prompt_tokens"]]
    assert [tokens] == read_with("genai", ROWS_OF_TOKENS, folder, json.dumps(rows), str(len(tokens)))


@pytest.mark.reader("genai")
def test_genai_transcribes_like_pytorch(tmp_path: Path) -> None:
    """The folder has genai's type whisper with our part names; features and tokens equal those of transformers."""
    checkpoint = save_encoder_decoder(tmp_path / "checkpoint", "whisper", seconds=30)
    torchscript = json.dumps({"export": {"exporter": "torchscript"}})
    folder = laid_out(checkpoint, tmp_path / "folder", "genai", "--no-verify", "-c", torchscript)
    sound = np.sin(np.arange(32_000) ** 1.2 / 90).astype(np.float32)
    soundfile.write(tmp_path / "tone.wav", sound, 16_000)
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    features = extractor(sound, sampling_rate=16000, return_tensors="np")["input_features"]
    given = np.concatenate([features, np.random.default_rng(0).normal(size=features.shape).astype(np.float32)])
    np.save(tmp_path / "features.npy", given)
    start = [3, 5, 9]
    model: Any = AutoModelForSpeechSeq2Seq.from_pretrained(checkpoint).eval()
    # Whisper's own loop puts other tokens first.
    expected = GenerationMixin.generate(
        model,
        input_features=torch.from_numpy(given),
        decoder_input_ids=torch.tensor([start] * 2),
        max_new_tokens=NEW_TOKENS,
    )
    arguments = (tmp_path / "tone.wav", tmp_path / "features.npy", json.dumps(start), str(NEW_TOKENS))
    made, written = read_with("genai", HEARD, folder, *arguments)
    assert expected[:, len(start) :].tolist() == written
    # The reader pads with zeros where transformers mirrors the signal: two frames at each end. The file holds
    # 16 bits of each value, which shows in the logarithm of silent bands.
    np.testing.assert_allclose(np.array(made)[..., 2:198], features[..., 2:198], rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small encoder with the files that publishers add."""
    folder = save_checkpoint("bert", tmp_path_factory.mktemp("bert") / "checkpoint", num_hidden_layers=1)
    save_tokenizer(folder)
    for name in ("LICENSE.txt", "notes.txt"):
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "README.md").write_text("---\nlicense: mit\nauto_map: {}\n---\n# Tiny\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def encoder(bert: Path) -> Path:
    """The encoder in the layout of transformers.js."""
    return laid_out(bert, bert.parent / "folder", "transformers.js", "--no-verify")


def test_layout_of_an_encoder_is_one_line(encoder: Path) -> None:
    """Rows and lengths are dynamic by default; the licence of the checkpoint is copied."""
    folder = encoder
    model = onnx.load(folder / "onnx" / "model.onnx", load_external_data=False)
    shapes = {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    assert [["batch_size", "sequence_length"]] * len(shapes) == list(shapes.values())
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "LICENSE.txt", "config.json", "tokenizer.json"} <= names
    assert "notes.txt" not in names


def test_model_card_states_source_files_and_use(bert: Path, encoder: Path) -> None:
    """The card of the checkpoint follows; of its front matter, keys that hold for the conversion are kept."""
    card = (encoder / "README.md").read_text(encoding="utf-8")
    matter, text = card.split("---\n", 2)[1:]
    assert {
        "license": "mit",
        "pipeline_tag": "feature-extraction",
        "tags": ["onnx", "transformers.js"],
    } == yaml.safe_load(matter)
    size_bytes = (encoder / "onnx" / "model.onnx").stat().st_size
    assert f"| `onnx/model.onnx` | {size_words(size_bytes)} |" in text
    assert "Licence of the source: mit (LICENSE.txt)" in text
    assert "```js\nimport" in text
    assert str(bert) not in text
    assert text.rstrip().endswith("# Tiny")


def test_card_of_sentence_transformers_states_the_modules_after_the_graph(tmp_path: Path) -> None:
    """Tags and base model of the source are kept; the size of an embedding holds after modules that no file has."""
    card = tmp_path / "README.md"
    card.write_text("---\ntags: [x, onnx]\nbase_model: foo/bar\n---\n# It", encoding="utf-8")
    facts = CardFacts(
        str(tmp_path), "feature-extraction", "readers", [], later_modules=("Pooling", "Dense"), tags=("onnx", "y")
    )
    matter, text = model_card(facts, {"README.md": card}).split("---\n", 2)[1:]
    assert {
        "base_model": "foo/bar",
        "pipeline_tag": "feature-extraction",
        "tags": ["onnx", "y", "x"],
    } == yaml.safe_load(matter)
    assert "* Not in the graph: Pooling, Dense of sentence-transformers." in text


def test_card_that_the_user_changed_is_not_replaced(bert: Path, tmp_path: Path) -> None:
    folder = laid_out(bert, tmp_path / "folder", "transformers.js", "--no-verify")
    made = (folder / "README.md").read_bytes()
    laid_out(bert, folder, "transformers.js", "--no-verify", "--precision", "int8", "--min-sqnr", "0")
    assert made != (folder / "README.md").read_bytes()
    (folder / "README.md").write_text("mine", encoding="utf-8")
    laid_out(bert, folder, "transformers.js", "--no-verify")
    assert "mine" == (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.reader("transformers.js")
def test_reader_of_an_encoder_equals_pytorch(bert: Path, encoder: Path) -> None:
    """The reader uses the unchanged folder in a pipeline."""
    vectors = np.array(read_with("transformers.js", VECTORS, encoder, PROMPT))
    tokens = AutoTokenizer.from_pretrained(bert)(PROMPT, return_tensors="pt")
    reference = AutoModel.from_pretrained(bert)(tokens["input_ids"]).last_hidden_state.detach().numpy()
    np.testing.assert_allclose(vectors, reference, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.reader("optimum")
def test_sentence_transformers_opens_a_folder_of_optimum(minilm_folder: Path, tmp_path: Path) -> None:
    """One command with dynamic sizes and real weights suffices; the vectors, pooled by the reader, equal PyTorch's."""
    from sentence_transformers import SentenceTransformer

    folder = laid_out(minilm_folder, tmp_path / "folder", "optimum", "--no-verify")
    texts = ["a short row", "a somewhat longer sentence about nothing in particular"]
    vectors = np.array(read_with("optimum", SENTENCE_VECTORS, folder, *texts))
    expected = SentenceTransformer(str(minilm_folder), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def data_layout(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder in the layout of transformers.js, with its weights in a separate file."""
    source = tmp_path_factory.mktemp("outside")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(built / name, source / name)
    model = onnx.load(built / "model.onnx")
    onnx.save(model, source / "model.onnx", save_as_external_data=True, location="weights", size_threshold=256)
    # The file is copied: a rewrite would store these small weights inside.
    return laid_out(source / "model.onnx", source / "folder", "transformers.js", "--no-optimize")


def test_external_weights_are_listed_for_a_browser(data_layout: Path, built: Path, tmp_path: Path) -> None:
    """The browser sees no folder, so the config counts the data files; its other keys and the weights are unchanged."""
    config = json.loads((data_layout / "config.json").read_bytes())
    assert {"use_external_data_format": {"model.onnx": 1}} == config.pop("transformers.js_config")
    assert json.loads((built / "config.json").read_bytes()) == config
    manifest = read_manifest((data_layout / "build_manifest.json").read_bytes())
    assert ["onnx/model.onnx", "onnx/model.onnx_data"] == [file.name for file in manifest.model]
    expected = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(built / "model.onnx").graph.initializer
    }
    placed = onnx.load(data_layout / "onnx" / "model.onnx").graph.initializer
    assert all(np.array_equal(expected[tensor.name], onnx.numpy_helper.to_array(tensor)) for tensor in placed)
    before = (data_layout / "onnx" / "model.onnx_data").stat().st_mtime_ns
    laid_out(data_layout.parent / "model.onnx", data_layout, "transformers.js", "--no-optimize")
    assert before == (data_layout / "onnx" / "model.onnx_data").stat().st_mtime_ns
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx_data").write_text("mine")
    outcome = run_here("build", "-m", data_layout.parent / "model.onnx", "-o", tmp_path, "--layout", "transformers.js")
    assert 2 == outcome.code
    assert "model.onnx_data exists" in outcome.err


@pytest.mark.reader("transformers.js")
def test_reader_fetches_weights_outside(data_layout: Path, expected: list[int]) -> None:
    """The reader requests exactly the existing files, and generates PyTorch's tokens."""
    fetched = read_with("transformers.js", FETCHED, data_layout)
    assert ["onnx/model.onnx", "onnx/model.onnx_data"] == [name for name in fetched if name.startswith("onnx/")]
    written = read_with("transformers.js", PROGRAMS["transformers.js"], data_layout, PROMPT, str(NEW_TOKENS))
    assert expected == written


def test_tokenizer_unreadable_by_transformers_js_is_noted(built: Path, tmp_path: Path) -> None:
    """transformers.js cannot read a plain list of words; the note stays valid if the folder is moved."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("model.onnx", "config.json"):
        shutil.copyfile(built / name, source / name)
    (source / "vocab.txt").write_text("[PAD]\n[UNK]\n", encoding="utf-8")
    folder = laid_out(source / "model.onnx", tmp_path / "folder", "transformers.js", "--no-optimize")
    manifest = read_manifest((folder / "build_manifest.json").read_bytes())
    assert (folder / "vocab.txt").is_file()
    (note,) = manifest.notes
    assert note.startswith("transformers.js")
    assert note.endswith("Put its files into the build folder (tokenizer.json).")


def test_layout_is_part_of_the_build(built: Path, tmp_path: Path) -> None:
    """The layout is stored in config and manifest, reused or changed; files of the earlier layout are removed."""
    folder = laid_out(built / "model.onnx", tmp_path / "folder", "transformers.js")
    manifest = read_manifest((folder / "build_manifest.json").read_bytes())
    assert ("transformers.js", "onnx/model.onnx") == (manifest.layout, manifest.model[0].name)
    assert "transformers.js" == json.loads((folder / "winml_build_config.json").read_bytes())["layout"]
    assert folder / "onnx" / "model.onnx" == onnx_file(str(folder))
    before = (folder / "onnx" / "model.onnx").stat().st_mtime_ns
    laid_out(built / "model.onnx", folder, "transformers.js")
    assert before == (folder / "onnx" / "model.onnx").stat().st_mtime_ns
    laid_out(built / "model.onnx", folder, "genai")
    assert not (folder / "onnx").exists()
    described = json.loads((folder / "genai_config.json").read_bytes())["model"]
    assert ("decoder", "model.onnx", 2, 2, 8, 64) == (
        described["type"],
        described["decoder"]["filename"],
        described["decoder"]["num_hidden_layers"],
        described["decoder"]["num_key_value_heads"],
        described["decoder"]["head_size"],
        described["context_length"],
    )
    assert 0 == run_here("build", "-m", built / "model.onnx", "-o", folder, "-q").code
    assert not (folder / "genai_config.json").exists()
    assert (folder / "model.onnx").is_file()


def test_folder_of_genai_has_the_prompts_of_foundry_local(shallow: Path, tmp_path: Path) -> None:
    """The texts of the roles are what each message adds to a chat."""
    source = shutil.copytree(shallow, tmp_path / "tiny chat")
    template = (
        "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|system|>\nBe kind.<|end|>\n{% endif %}"
        "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% elif messages[-1]['role'] == 'assistant' %}{{ eos_token }}"
        "{% endif %}"
    )
    (source / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = source / "tokenizer_config.json"
    record = json.loads(config.read_bytes()) if config.exists() else {}
    config.write_text(json.dumps({**record, "eos_token": "</s>"}), encoding="utf-8")
    folder = laid_out(source, tmp_path / "folder", "genai", "--no-verify")
    assert {
        "Name": "tiny chat",
        "PromptTemplate": {
            "system": "<|system|>\n{Content}<|end|>\n",
            "user": "<|user|>\n{Content}<|end|>\n",
            "assistant": "<|assistant|>\n{Content}<|end|>\n</s>",
            "prompt": "<|user|>\n{Content}<|end|>\n<|assistant|>\n",
        },
    } == json.loads((folder / "inference_model.json").read_bytes())


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (WITHOUT_SYSTEM, ("user", "assistant", "prompt")),
        ("{{ messages | length }}{{ messages[-1]['content'] }}", ()),
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", ()),
        (None, ()),
    ],
    ids=["no system", "no texts", "endless", "no template"],
)
def test_prompts_of_foundry_local_are_those_that_a_template_has(
    template: str | None, roles: tuple[str, ...], tmp_path: Path
) -> None:
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    record = foundry_record("org/tiny", tmp_path)
    assert ("tiny", roles) == (record["Name"], tuple(record.get("PromptTemplate", ())))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A llava, and its folder for transformers.js."""
    checkpoint = save_vision_language(tmp_path_factory.mktemp("llava") / "checkpoint")
    return checkpoint, laid_out(checkpoint, checkpoint.parent / "folder", "transformers.js")


def test_embedding_for_transformers_js_takes_tokens_alone(seeing: tuple[Path, Path]) -> None:
    """Winml inserts the features of images itself when it runs the folder."""
    checkpoint, folder = seeing
    inputs = {
        path.stem: [value.name for value in onnx.load(path, load_external_data=False).graph.input]
        for path in (folder / "onnx").glob("*.onnx")
    }
    assert (["input_ids"], ["pixel_values"]) == (inputs["embed_tokens"], inputs["vision_encoder"])
    image = save_image(checkpoint.parent / "image.png")
    plain = checkpoint.parent / "plain"
    assert 0 == run_here("build", checkpoint, "-o", plain, "-q").code
    texts = []
    for build in (plain, folder):
        asked = ("--image", image, "-p", "w5 w6", "--max-new-tokens", "6", "-f", "json")
        done = run_here("generate", build, *asked)
        assert 0 == done.code, done.err
        texts.append(json.loads(done.out)["text"])
    assert texts[0] == texts[1] != ""


@pytest.mark.reader("transformers.js")
@pytest.mark.parametrize(
    ("kind", "text"),
    [("llava", "w5 <image> w6 w7"), ("gemma3", "w5 <boi> w6 w7"), ("qwen2_5_vl", "w5 <boi> <image> <eoi> w6 w7")],
)
def test_transformers_js_reads_images_as_pytorch(
    kind: str, text: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The reader inserts image features; image tokens that attend to later ones, and rows and columns, are covered."""
    if kind == "llava":
        checkpoint, folder = request.getfixturevalue("seeing")
    else:
        checkpoint = save_vision_language(tmp_path / "checkpoint", kind)
        folder = laid_out(checkpoint, tmp_path / "folder", "transformers.js", "--no-verify")
    image = Image.open(save_image(tmp_path / "image.png"))
    made = vision_language_processor(kind)(text=[text], images=[image], return_tensors="pt")
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    # Without repetitions, each token depends on the scores of several.
    limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "no_repeat_ngram_size": 1}
    expected = model.generate(**made, **limits)[0, made["input_ids"].shape[1] :].tolist()
    tensors = {
        name: (str(value.dtype).removeprefix("torch."), list(value.shape), value.flatten().tolist())
        for name, value in made.items()
    }
    (tmp_path / "inputs.json").write_text(json.dumps(tensors), encoding="utf-8")
    assert expected == read_with("transformers.js", SEEN, folder, tmp_path / "inputs.json", str(NEW_TOKENS))


@pytest.mark.reader("transformers.js")
def test_transformers_js_finds_masks_as_pytorch(tmp_path: Path) -> None:
    """The reader encodes an image, and passes its vectors and positions to the second graph."""
    save_sam(tmp_path / "sam")
    folder = laid_out(tmp_path / "sam", tmp_path / "folder", "transformers.js", "-t", "mask-generation", "--no-verify")
    pixels, points = torch.randn(1, 3, 64, 64), torch.tensor([[[[20.0, 20.0]], [[45.0, 10.0]]]])
    tensors = {name: (list(value.shape), value.flatten().tolist()) for name, value in
               (("pixels", pixels), ("points", points))}  # fmt: skip
    (tmp_path / "inputs.json").write_text(json.dumps(tensors), encoding="utf-8")
    with torch.inference_mode():
        model = transformers.SamModel.from_pretrained(tmp_path / "sam").eval()
        outputs = model(pixel_values=pixels, input_points=points)
    found = read_with("transformers.js", MASKS, folder, tmp_path / "inputs.json")
    for (shape, values), expected in zip(found, (outputs.iou_scores, outputs.pred_masks), strict=True):
        assert list(expected.shape) == shape
        # Rounding of float32; 2e-6 was observed.
        assert np.array(values).reshape(shape) == pytest.approx(
            expected.numpy(), abs=1e-4 * float(expected.abs().max())
        )


@pytest.mark.reader("genai")
@pytest.mark.parametrize(
    ("kind", "text"), [("gemma3", "ab<start_of_image>cd"), ("qwen2_5_vl", "ab<|vision_start|><|vision_end|>cd")]
)
def test_genai_reads_images_as_pytorch(kind: str, text: str, tmp_path: Path) -> None:
    """Tokens, pixels, scores and text are made by the reader's own processor; a text without image is covered too."""
    checkpoint = save_with_genai_marks(tmp_path / "checkpoint", kind)
    outcome = run_here("build", "-m", checkpoint, "-o", tmp_path / "folder", "--layout", "genai", "--no-verify")
    assert 0 == outcome.code, outcome.err
    image = save_image(tmp_path / "image.png")
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    processor = genai_processor(kind)
    for picture in (image, None):
        words = text.replace("<|vision_end|>", "<|image_pad|><|vision_end|>") if picture else "abc"
        pictures = {} if picture is None else {"images": [Image.open(picture)]}
        made = processor(text=[words], **pictures, return_tensors="pt")
        limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "no_repeat_ngram_size": 1}
        expected = model.generate(**made, **limits)[0, made["input_ids"].shape[1] :].tolist()
        with torch.no_grad():
            scores = model(**made).logits[0, -1].tolist()
        asked = (text if picture else "abc", picture or "", str(NEW_TOKENS))
        tokens, pixels, seen_scores, written = read_with("genai", SEEN_BY_GENAI, tmp_path / "folder", *asked)
        assert made["input_ids"].tolist() == tokens
        if picture is not None:
            # Resized by the same code; only the rounding of the normalization differs.
            np.testing.assert_allclose(np.ravel(pixels), made["pixel_values"].numpy().ravel(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(seen_scores, scores, rtol=0, atol=1e-4)
        assert expected == written
    first = next(line for line in outcome.out.splitlines() if line.startswith("use "))
    lines = outcome.out.splitlines()[outcome.out.splitlines().index(first) :]
    code = "\n".join(line[len("use") + len(first[3:]) - len(first[3:].lstrip()) :] for line in lines)
    assert run_code("genai", code.replace("image.png", str(image))).strip()


@pytest.mark.reader("lm-eval")
@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime-genai"])
def test_scores_of_lm_eval_equal_those_of_pytorch(checkpoint: Path, built: Path, tmp_path: Path, backend: str) -> None:
    folder = laid_out(built / "model.onnx", tmp_path / "folder", "genai")
    pairs = [(PROMPT, " bal"), (PROMPT, " zu ber")]
    scores = read_with("lm-eval", SCORED, folder, backend, json.dumps(pairs))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    expected = []
    for context, continuation in pairs:
        count = len(tokenizer(context)["input_ids"])
        tokens = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            values = model(tokens).logits[0].log_softmax(-1)[count - 1 : -1]
        expected.append(float(values.gather(-1, tokens[0, count:, None]).sum()))
    assert expected == pytest.approx(scores, abs=1e-4)  # float32


def test_fused_decoder_is_written_once_without_a_comparison(shallow: Path, tmp_path: Path) -> None:
    """The file has the fused operators of a verified build; float16 weights stay float16."""
    verified = laid_out(shallow, tmp_path / "verified", "genai")
    folder = laid_out(shallow, tmp_path / "folder", "genai", "--no-verify")
    assert not (folder / "export.onnx").exists()
    fused = [[node.op_type for node in onnx.load(path / "model.onnx").graph.node] for path in (verified, folder)]
    assert fused[0].count("GroupQueryAttention") == fused[1].count("GroupQueryAttention") > 0
    transformers.AutoModelForCausalLM.from_pretrained(shallow, dtype="float16").save_pretrained(tmp_path / "half")
    shutil.copyfile(shallow / "tokenizer.json", tmp_path / "half" / "tokenizer.json")
    folder = laid_out(tmp_path / "half", tmp_path / "folder of half", "genai", "--no-verify")
    weights = onnx.load(folder / "model.onnx").graph.initializer
    assert onnx.TensorProto.FLOAT16 in {weight.data_type for weight in weights if len(weight.dims) == 2}


def test_change_of_layout_keeps_the_graph_of_a_plain_decoder(shallow: Path, tmp_path: Path) -> None:
    """The export is reused for each layout: only an encoder-decoder is exported differently for optimum."""
    folder = tmp_path / "folder"
    build = ("build", "-m", shallow, "-o", folder, "--no-verify", "-q")
    assert 0 == run_here(*build).code
    for layout in (("--layout", "genai"), ("--layout", "optimum"), ()):
        assert 0 == run_here(*build, *layout).code
        export = read_manifest((folder / "build_manifest.json").read_bytes()).parts[0].stage("export")
        assert export is not None
        assert "reused" == export.status


def test_embedding_tables_for_browsers_have_no_operator_of_blocks(shallow: Path, tmp_path: Path) -> None:
    """ONNX Runtime in WebAssembly has no GatherBlockQuantized; WebGPU has, and an option decides."""
    counts = {}
    for name, options in {"any": (), "webgpu": ("--ep", "webgpu"), "blocks": ("--tables", "blocks")}.items():
        folder = laid_out(
            shallow, tmp_path / name, "transformers.js", "--precision", "int4", "--no-verify", "--deploy-only", *options
        )
        nodes = onnx.load(folder / "onnx" / "model_q4.onnx").graph.node
        counts[name] = sum(node.op_type == "GatherBlockQuantized" for node in nodes)
    assert {"any": 0, "webgpu": 1, "blocks": 1} == counts


@pytest.mark.parametrize(
    ("ep", "options"),
    [
        ("webgpu", {"webgpu": {"enableGraphCapture": "0", "validationMode": "basic"}}),
        ("cuda", {"cuda": {"enable_cuda_graph": "0"}}),
        ("dml", {"dml": {"enable_graph_capture": "0"}}),
        ("cpu", None),
    ],
)
def test_genai_config_names_the_provider(built: Path, tmp_path: Path, ep: str, options: Any) -> None:
    """Runs have different shapes, so that no graph is captured."""
    folder = laid_out(built / "model.onnx", tmp_path, "genai", "--ep", ep, "--no-optimize", "--no-verify")
    decoder = json.loads((folder / "genai_config.json").read_bytes())["model"]["decoder"]
    assert ([] if options is None else [options]) == decoder["session_options"]["provider_options"]


@pytest.mark.reader("genai")
@pytest.mark.skipif(not SWIFTSHADER.is_file(), reason=f"no {SWIFTSHADER}")
def test_genai_generates_on_the_provider_of_its_config(
    exact_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4-bit weights on WebGPU give the tokens of PyTorch."""
    monkeypatch.setenv("VK_DRIVER_FILES", str(SWIFTSHADER))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(SWIFTSHADER.parent))  # Chromium's libvulkan.so.1, if none is installed
    monkeypatch.setenv("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = ("--ep", "webgpu", "--precision", "int4", "--no-verify")
    folder = laid_out(exact_checkpoint, tmp_path / "folder", "genai", *options)
    tokens = AutoTokenizer.from_pretrained(exact_checkpoint)(PROMPT, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(exact_checkpoint).eval()
    expected = model.generate(tokens, max_new_tokens=NEW_TOKENS)[0, tokens.shape[1] :].tolist()
    assert expected == read_with("genai", ON_WEBGPU + PROGRAMS["genai"], folder, PROMPT, str(NEW_TOKENS))


def test_provider_without_options_in_genai_is_refused(built: Path, tmp_path: Path) -> None:
    """The config of another provider would be that of the CPU."""
    outcome = run_here("build", "-m", built / "model.onnx", "-o", tmp_path / "a", "--layout", "genai", "--ep", "qnn")
    assert 2 == outcome.code
    assert "cuda" in outcome.err
    assert not (tmp_path / "a").exists()


def test_name_of_a_model_bears_its_precision(built: Path, tmp_path: Path) -> None:
    """transformers.js finds a model by the precision in its name."""
    folder = laid_out(
        built / "model.onnx", tmp_path / "folder", "transformers.js", "--precision", "int8", "--no-verify"
    )
    assert ["model_quantized.onnx"] == [path.name for path in (folder / "onnx").glob("*.onnx")]
    outcome = run_here(
        "build", "-m", built / "model.onnx", "-o", tmp_path / "b", "--layout", "transformers.js", "--precision", "w8a16"
    )
    assert 2 == outcome.code
    assert "precision w8a16" in outcome.err


DTYPES = ("q4", "q4f16", "fp16", "fp32")
SUFFIXES = {"fp32": "", "fp16": "_fp16", "q8": "_quantized", "int8": "_int8", "uint8": "_uint8", "q4": "_q4",
            "q4f16": "_q4f16", "bnb4": "_bnb4"}  # fmt: skip
"""Dtype of transformers.js → end of the file name."""


@pytest.fixture(scope="module")
def exact_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama with weights that 4 bits represent exactly."""
    source = shutil.copytree(checkpoint, tmp_path_factory.mktemp("exact") / "checkpoint")
    model: Any = AutoModelForCausalLM.from_pretrained(source).eval()
    _fill_with_4_bits(model)
    model.save_pretrained(source)
    return source


@pytest.fixture(scope="module")
def several_dtypes(exact_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama in several dtypes of transformers.js."""
    folder = tmp_path_factory.mktemp("dtypes") / "folder"
    return laid_out(exact_checkpoint, folder, "transformers.js", "--dtypes", ",".join(DTYPES))


def _cache_types(model: Path) -> set[int]:
    graph = onnx.load(model, load_external_data=False).graph
    states = [
        value for value in (*graph.input, *graph.output) if value.name.startswith(("past_key_values.", "present."))
    ]
    return {value.type.tensor_type.elem_type for value in states}


def test_dtypes_are_written_from_one_fused_graph(several_dtypes: Path) -> None:
    """Files with float16 have a float16 cache, which the config names; logits stay float32."""
    names = {f"model{SUFFIXES[dtype]}.onnx" for dtype in DTYPES}
    assert names == {path.name for path in (several_dtypes / "onnx").glob("*.onnx")}
    for dtype in DTYPES:
        path = several_dtypes / "onnx" / f"model{SUFFIXES[dtype]}.onnx"
        is_half = dtype in ("q4f16", "fp16")
        assert {onnx.TensorProto.FLOAT16 if is_half else onnx.TensorProto.FLOAT} == _cache_types(path)
        graph = onnx.load(path).graph
        assert "GroupQueryAttention" in {node.op_type for node in graph.node}
        assert onnx.TensorProto.FLOAT == graph.output[0].type.tensor_type.elem_type
    config = json.loads((several_dtypes / "config.json").read_bytes())["transformers.js_config"]
    assert {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}} == config
    manifest = read_manifest((several_dtypes / "build_manifest.json").read_bytes())
    assert names == {Path(file.name).name for file in manifest.deploy if file.name.endswith(".onnx")}
    assert several_dtypes / "onnx" / "model_q4.onnx" == onnx_file(str(several_dtypes))


def test_other_dtypes_reuse_the_export(several_dtypes: Path, exact_checkpoint: Path, tmp_path: Path) -> None:
    """Files of dtypes that are no longer requested are removed; equal requests reuse all files."""
    folder = shutil.copytree(several_dtypes, tmp_path / "folder")

    def statuses(*dtypes: str) -> list[str]:
        laid_out(exact_checkpoint, folder, "transformers.js", "--dtypes", ",".join(dtypes))
        return [stage.status for stage in read_manifest((folder / "build_manifest.json").read_bytes()).stages]

    assert ["reused", "reused", "reused", "skipped"] == statuses(*DTYPES)
    assert ["reused", "reused", "run", "skipped"] == statuses("q4f16")
    assert ["model_q4f16.onnx"] == [path.name for path in (folder / "onnx").glob("*.onnx")]


@pytest.mark.reader("transformers.js")
@pytest.mark.parametrize("dtype", DTYPES)
def test_reader_of_a_dtype_writes_what_pytorch_writes(several_dtypes: Path, exact_checkpoint: Path, dtype: str) -> None:
    """The reader allocates a cache in the type of the file."""
    tokens = AutoTokenizer.from_pretrained(exact_checkpoint)(PROMPT, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(exact_checkpoint).eval()
    expected = model.generate(tokens, max_new_tokens=NEW_TOKENS)[0, tokens.shape[1] :].tolist()
    program = PROGRAMS["transformers.js"].replace("'fp32'", f"'{dtype}'")
    assert expected == read_with("transformers.js", program, several_dtypes, PROMPT, str(NEW_TOKENS))


def save_classifier(folder: Path) -> Path:
    """Write the checkpoint of a small classifier of texts, and return the folder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=64, num_labels=3)
    transformers.BertForSequenceClassification(config).eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def run_classifier(folder: Path, suffix: str) -> np.ndarray:
    """Return the logits of the prompt, computed by ONNX Runtime's CPU provider."""
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="np")
    session = onnxruntime.InferenceSession(folder / "onnx" / f"model{suffix}.onnx")
    logits, *_ = session.run(None, {**tokens, "token_type_ids": np.zeros_like(tokens["input_ids"])})
    return np.asarray(logits)[0]


@pytest.mark.reader("transformers.js")
def test_reader_of_dtypes_of_a_classifier_answers_as_the_processor(tmp_path: Path) -> None:
    """Each file has the logits that ONNX Runtime's CPU provider computes with it."""
    options = ("--dtypes", ",".join(SUFFIXES), "--no-verify", "--deploy-only")
    folder = laid_out(save_classifier(tmp_path / "checkpoint"), tmp_path / "folder", "transformers.js", *options)
    assert not list(folder.glob("quantized*"))
    found = read_with("transformers.js", LOGITS, folder, PROMPT, *SUFFIXES)
    for dtype, suffix in SUFFIXES.items():
        np.testing.assert_allclose(found[dtype], run_classifier(folder, suffix), rtol=0, atol=5e-3)


@pytest.mark.reader("transformers.js")
def test_reader_of_dtypes_of_an_encoder_decoder_writes_what_pytorch_writes(tmp_path: Path) -> None:
    """Each part has a file of each dtype."""
    checkpoint = save_encoder_decoder(tmp_path / "checkpoint", "t5")
    given = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    asked = {"max_new_tokens": NEW_TOKENS, "no_repeat_ngram_size": 1}
    expected = model.generate(given["input_ids"], attention_mask=given["attention_mask"], **asked)[0].tolist()
    folder = laid_out(checkpoint, tmp_path / "folder", "transformers.js", "--no-verify", "--dtypes", "fp16,q8,fp32")
    assert 6 == len(list((folder / "onnx").glob("*.onnx")))
    for dtype in ("fp16", "fp32"):
        program = ENCODED_PROGRAMS["transformers.js"].replace("'fp32'", f"'{dtype}'")
        assert expected == read_with("transformers.js", program, folder, PROMPT, str(NEW_TOKENS))


@pytest.fixture(scope="module")
def web_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with transformers.js and ONNX Runtime for browsers."""
    folder = tmp_path_factory.mktemp("web")
    packages = folder_of("transformers.js") / "node_modules"
    (folder / "transformers.min.js").symlink_to(packages / "@huggingface/transformers/dist/transformers.min.js")
    for end in ("mjs", "wasm"):
        name = f"ort-wasm-simd-threaded.asyncify.{end}"
        (folder / name).symlink_to(packages / "onnxruntime-web/dist" / name)
    return folder


@pytest.fixture(scope="module")
def webgpu_browser() -> Iterator[Browser]:
    """A browser with WebGPU in software."""
    command = find_program(BROWSERS)
    assert command is not None
    with opened_browser(command, WEBGPU) as opened:
        yield opened


@pytest.mark.reader("transformers.js")
def test_dtypes_in_a_browser_answer_as_on_the_processor(
    web_folder: Path, webgpu_browser: Browser, tmp_path: Path
) -> None:
    """The 4-bit file has only operators that WebAssembly and WebGPU run."""
    checkpoint = save_decoder(tmp_path / "decoder", num_hidden_layers=1)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    _fill_with_4_bits(model)
    model.save_pretrained(checkpoint)
    tokens = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(tokens, max_new_tokens=4)[0, tokens.shape[1] :].tolist()
    options = ("--dtypes", "q4,q8,bnb4,fp32", "--no-verify")
    laid_out(checkpoint, web_folder / "decoder", "transformers.js", *options)
    laid_out(save_classifier(tmp_path / "classifier"), web_folder / "classifier", "transformers.js", *options)
    with served(web_folder) as address:
        (web_folder / "index.html").write_text(IN_BROWSER)
        webgpu_browser.open(address)
        for device, dtype in (("wasm", "q8"), ("wasm", "q4"), ("webgpu", "q4")):
            written = webgpu_browser.run(f"write('decoder', '{dtype}', '{device}', '{PROMPT}', 4)")
            assert expected == written, (device, dtype)
        for device, dtype in (("wasm", "q4"), ("wasm", "bnb4"), ("webgpu", "fp32")):
            found = webgpu_browser.run(f"classify('classifier', '{dtype}', '{device}', '{PROMPT}')")
            expected_logits = run_classifier(web_folder / "classifier", SUFFIXES[dtype])
            np.testing.assert_allclose(found, expected_logits, rtol=0, atol=5e-3)


@pytest.mark.reader("transformers.js")
def test_page_of_the_documentation_runs_a_pipeline(web_folder: Path, webgpu_browser: Browser, bert: Path) -> None:
    """The page needs no file of another host."""
    laid_out(bert, web_folder / "web", "transformers.js", "--precision", "int8", "--no-verify")
    guide = (REPOSITORY / "docs" / "how_to" / "browser.md").read_text(encoding="utf-8")
    (web_folder / "index.html").write_text(guide.partition("```html\n")[2].partition("```")[0])
    with served(web_folder) as address:
        webgpu_browser.open(address)
        wait = (
            "new Promise(done => setInterval(() => document.body.textContent && done(document.body.textContent), 20))"
        )
        assert "2,32" == webgpu_browser.run(wait), webgpu_browser.problems


def test_data_of_dtypes_are_counted_by_file(data_layout: Path, tmp_path: Path) -> None:
    """A browser fetches the data of a file that has data, and of no other."""
    source = data_layout.parent / "model.onnx"
    folder = laid_out(
        source, tmp_path / "folder", "transformers.js", "--dtypes", "q8,fp32", "--no-verify", "--no-optimize"
    )
    config = json.loads((folder / "config.json").read_bytes())["transformers.js_config"]
    assert {"use_external_data_format": {"model.onnx": 1}} == config
    names = {"model_quantized.onnx", "model.onnx", "model.onnx_data", "model_quantized_htp_metadata.json"}
    assert names >= {path.name for path in (folder / "onnx").iterdir()} >= {"model.onnx_data"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--layout", "optimum", "--dtypes", "q4"), "optimum has no dtypes"),
        (("--dtypes", "q4"), "no layout"),
        (("--layout", "transformers.js", "--dtypes", "q4,q5"), "--dtypes q5"),
        (("--layout", "transformers.js", "--dtypes", "q1"), "--dtypes q1"),
        (("--layout", "transformers.js", "--dtypes", ","), "no dtype"),
        (("--layout", "transformers.js", "--dtypes", "q8,q4,q8"), "q8 is named twice"),
        (("--layout", "transformers.js", "--dtypes", "fp32", "--block-size", "32"), "--block-size does not apply to"),
        (("--layout", "transformers.js", "--dtypes", "fp16,fp32", "--exclude", "lm_head", "--mode", "qdq"), "--mode"),
        (("--layout", "transformers.js", "--dtypes", "q4", "--precision", "int8"), "--precision"),
        (("--layout", "transformers.js", "--dtypes", "q4", "--no-quant"), "--no-quant"),
        (("--layout", "transformers.js", "--dtypes", "q8", "--block-size", "32"), "--dtypes q8: --block-size 32"),
    ],
)
def test_dtypes_that_cannot_be_written_are_refused_before_the_export(
    shallow: Path, tmp_path: Path, options: tuple[str, ...], word: str
) -> None:
    """The folder is not created."""
    outcome = run_here("build", "-m", shallow, "-o", tmp_path / "folder", *options)
    assert 2 == outcome.code
    assert word in outcome.err
    assert not (tmp_path / "folder").exists()


def test_states_and_tasks_unknown_to_a_reader_are_refused(bert: Path, tmp_path: Path) -> None:
    """A state other than key and value, and a task without a class, are refused."""
    model = counting_graph(tmp_path / "counting.onnx")
    outcome = run_here("build", "-m", model, "-o", tmp_path / "a", "--layout", "genai")
    assert 2 == outcome.code
    assert "onnxruntime-genai" in outcome.err
    task = ("--task", "next-sentence-prediction", "--no-verify", "--random-weights")
    outcome = run_here("build", "-m", bert, "-o", tmp_path / "b", "--layout", "optimum", *task)
    assert 2 == outcome.code
    assert "next-sentence-prediction" in outcome.err


UNKNOWN: list[tuple[str, str, str]] = [
    ("mixtral", "transformers.js", "mixtral"),
    ("roberta-prelayernorm", "transformers.js", "roberta-prelayernorm"),
    *((name, layout, "vision-language") for name in ("llava", "qwen3_vl") for layout in ("genai", "optimum")),
    ("qwen3_vl", "transformers.js", "image-text-to-text"),
    *(("mamba", layout, "states") for layout in PROGRAMS),
    *(("qwen3_next", layout, "states") for layout in PROGRAMS),
    ("t5", "genai", "encoder-decoder"),
    ("bert", "genai", "BertForMaskedLM"),
]
"""Model type, layout without a class for it, and a word of the reason."""
ARCHITECTURES = {
    "bert": "BertForMaskedLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM", "llama": "LlamaForCausalLM",
    "llava": "LlavaForConditionalGeneration", "mamba": "MambaForCausalLM", "mixtral": "MixtralForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM", "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "roberta-prelayernorm": "RobertaPreLayerNormForSequenceClassification", "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}  # fmt: skip


def _dry_run(model_type: str, layout: str, folder: Path, *options: str, **changes: Any) -> Outcome:
    """Plan the build of a config without weights."""
    config = transformers.AutoConfig.for_model(model_type, architectures=[ARCHITECTURES[model_type]], **changes)
    config.save_pretrained(folder / model_type)
    config_file = folder / model_type / "config.json"
    asked = ("--layout", layout, "--random-weights", "--dry-run", *options)
    return run_here("build", "-m", config_file, "-o", folder / "out", *asked)


@pytest.mark.parametrize(("model_type", "layout", "words"), UNKNOWN)
def test_model_type_without_a_class_is_refused_before_the_export(
    model_type: str, layout: str, words: str, tmp_path: Path
) -> None:
    """The plan refuses the model type, so that a dry run fails too and no export runs in vain."""
    outcome = _dry_run(model_type, layout, tmp_path)
    assert 2 == outcome.code
    for word in (f"--layout {layout}", words, "Remove --layout"):
        assert word in outcome.err


def test_model_types_with_a_class_are_planned(tmp_path: Path) -> None:
    """A hybrid without recurrent layers, a recurrent decoder without a cache and a headless model are planned too."""
    for model_type, layout, options, changes in (
        ("llama", "genai", (), {}),
        ("whisper", "genai", (), {}),
        ("t5", "transformers.js", (), {}),
        ("mixtral", "optimum", (), {}),
        ("mixtral", "transformers.js", ("--task", "feature-extraction"), {}),
        ("granitemoehybrid", "transformers.js", (), {"layer_types": ["attention"] * 2, "num_hidden_layers": 2}),
        ("mamba", "optimum", ("--no-cache",), {}),
        *((name, layout, (), {}) for name in ("gemma3", "qwen2_5_vl") for layout in ("genai", "transformers.js")),
    ):
        outcome = _dry_run(model_type, layout, tmp_path / model_type / layout, *options, **changes)
        assert 0 == outcome.code, outcome.err


def test_number_of_image_tokens_unknown_to_genai_is_refused(tmp_path: Path) -> None:
    """The processor of onnxruntime-genai writes 256 tokens for an image of Gemma 3."""
    outcome = _dry_run("gemma3", "genai", tmp_path, mm_tokens_per_image=64)
    assert 2 == outcome.code
    assert "mm_tokens_per_image 64; expected 256" in outcome.err


def test_graph_with_recurrent_states_is_refused_with_any_config(tmp_path: Path) -> None:
    """Without a config, the names of the inputs decide."""
    graph = counting_graph(tmp_path / "counting.onnx")
    model = onnx.load(graph)
    for names in (model.graph.input, model.graph.node[-1].input, *(node.input for node in model.graph.node)):
        for place, value in enumerate(names):
            if getattr(value, "name", value) == "state":
                if isinstance(value, str):
                    names[place] = "past_recurrent.0"  # type: ignore[index]
                else:
                    value.name = "past_recurrent.0"
    onnx.save(model, graph)
    outcome = run_here("build", "-m", graph, "-o", tmp_path / "out", "--layout", "optimum")
    assert 2 == outcome.code
    assert "recurrent states" in outcome.err


@pytest.mark.parametrize("layout", ["optimum", "transformers.js"])
def test_processor_settings_are_copied_for_readers(clip: Path, tmp_path: Path, layout: str) -> None:
    """Transformers 5 stores the settings of a processor in one file; readers expect its sections as separate files."""
    checkpoint = shutil.copytree(clip, tmp_path / "clip")
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    (checkpoint / "preprocessor_config.json").unlink()
    whole = {"image_processor": settings, "processor_class": "CLIPProcessor"}
    (checkpoint / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")
    outcome = run_here("build", "-m", checkpoint, "-o", tmp_path / "out", "--layout", layout, "--no-verify")
    assert 0 == outcome.code, outcome.err
    written = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert {**settings, "processor_class": "CLIPProcessor"} == written
