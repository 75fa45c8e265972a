"""Tokens of small generative models in each dtype, in ONNX Runtime, a browser and onnxruntime-genai.

Method. Checkpoints with two layers and seeded weights are written. Four bits represent the weights, so that a dtype
only changes how values are rounded. Of several hundred prompts, one is taken whose first two candidates are far apart
in PyTorch in every step. For each model these build:

* ``winml build -m CHECKPOINT -o FOLDER --layout transformers.js --dtypes fp32,fp16,…``
* for each dtype ``winml build -m CHECKPOINT -o FOLDER --layout genai --ep webgpu``

Each file generates greedily: in ONNX Runtime on the CPU and on WebGPU, in transformers.js in headless Chromium on
WebAssembly and on WebGPU, and in onnxruntime-genai on WebGPU. The tokens are compared with those of PyTorch in float32.
ONNX Runtime's profile of the last token is counted: nodes that WebGPU ran, nodes that fell back to the CPU, and values
copied between nodes of the two. No time is measured: an adapter in software says nothing about the time on a GPU.

Prompts have fewer than 32 tokens, since attention of more is wrong on drivers in software. Chromium's driver has no
16-bit floats; ``--half-command`` starts a process with a driver that has.

A table, then JSON. Needs what ``make readers`` installs for transformers.js, genai and webgpu, Chromium, and an
adapter; with ``ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1`` and ``VK_DRIVER_FILES`` a Vulkan driver in software is one.

    python benchmarks/gpu_readers.py --genai-python PYTHON --ep-library webgpu=PATH [--half-command "COMMAND"]
        [--models llama,t5] [--dtypes fp32,q4] [--tokens 8] [--folder DIR] [--save]

``PYTHON`` is that of an environment with onnxruntime-genai.
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]
sys.path += [str(REPOSITORY / "scripts"), str(REPOSITORY / "tests")]

import argparse  # noqa: E402  # behind the lines above, as everything here
import json  # noqa: E402
import shlex  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any  # noqa: E402

from gpu import (  # noqa: E402
    END,
    ENDS,
    MODELS,
    PROMPT_TOKENS,
    PROMPTS,
    PROVIDER,
    START,
    choose_example,
    count_last_run,
    fill_with_4_bits,
    provider_session,
    save_checkpoint,
)
from results import add_save_option, markdown_table, publish  # noqa: E402

ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 512}),
    "whisper": (
        "Whisper",
        {
            "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 512,
            "max_source_positions": 24, "max_target_positions": 64, "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}  # fmt: skip
"""Name of a model → start of its classes in transformers, and config values; Whisper reads 48 frames."""
READERS = {
    "cpu": "ORT CPU", "webgpu": "ORT WebGPU", "browser_wasm": "Chromium WASM", "browser_webgpu": "Chromium WebGPU",
    "genai": "genai WebGPU",
}  # fmt: skip
NO_HALVES = "no 16-bit floats in the driver"
HALF_DTYPES = ("fp16", "q4f16")
GENAI_OPTIONS = {
    "fp32": (), "fp16": ("--dtype", "fp16"), "q8": ("--precision", "int8"), "q4": ("--precision", "int4"),
    "q4f16": ("--dtype", "fp16", "--precision", "int4"),
}  # fmt: skip
"""Dtype of transformers.js → options of a build for onnxruntime-genai."""
GENAI = """
import json, sys, numpy as np, onnxruntime_genai as og
library, folder, prompt, count, features = sys.argv[1:]
og.register_execution_provider_library("WebGpuExecutionProvider", library)
model, prompt = og.Model(folder), json.loads(prompt)
options = og.GeneratorParams(model)
length = len(prompt) + int(count)
options.set_search_options(do_sample=False, batch_size=1, min_length=length, max_length=length)
generator = og.Generator(model, options)
if features:
    inputs = og.NamedTensors()
    inputs["audio_features"] = np.load(features)
    generator.set_inputs(inputs)
generator.append_tokens(np.array([prompt], np.int32))
written = []
while not generator.is_done():
    generator.generate_next_token()
    written.append(int(generator.get_next_tokens()[0]))
print(json.dumps(written))
"""
PAGE = """<!doctype html><link rel="icon" href="data:,"><script type="module">
import * as transformers from './transformers.min.js';
const { Tensor, env } = transformers;
env.allowLocalModels = true;
env.allowRemoteModels = false;
env.localModelPath = './';
env.backends.onnx.wasm.wasmPaths = './';
const integers = values => new Tensor('int64', BigInt64Array.from(values.map(BigInt)), [1, values.length]);
window.write = async (kind, folder, dtype, device, example, count) => {
    try {
        const model = await transformers[kind].from_pretrained(folder, { dtype, device });
        const asked = { max_new_tokens: count, min_new_tokens: count, do_sample: false };
        let inputs, skipped;
        if (example.features) {
            const features = new Tensor('float32', Float32Array.from(example.features.flat()),
                [1, example.features.length, example.features[0].length]);
            inputs = { input_features: features, decoder_input_ids: integers(example.start) };
            skipped = example.start.length;
        } else {
            const ids = integers(example.prompt);
            inputs = { input_ids: ids, attention_mask: integers(example.prompt.map(() => 1)) };
            skipped = kind === 'AutoModelForCausalLM' ? example.prompt.length : 1;
        }
        const all = await model.generate({ ...inputs, ...asked });
        return all.tolist()[0].slice(skipped).map(Number);
    } catch (error) {
        return String(error.message ?? error);
    }
};
window.loaded = true;
</script>"""


def save_encoder_decoder(name: str, folder: Path, count: int) -> None:
    """Write the checkpoint of an encoder-decoder, as :func:`gpu.save_checkpoint` does of a decoder."""
    import torch
    import transformers

    torch.manual_seed(0)
    start, sizes = ENCODER_DECODERS[name]
    config = getattr(transformers, f"{start}Config")(**sizes, **ENDS, decoder_start_token_id=START)
    model = getattr(transformers, f"{start}ForConditionalGeneration")(config).eval()
    fill_with_4_bits(model)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, config.vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "whisper":
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(PROMPTS, config.num_mel_bins, frames, generator=generator)}
        transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1).save_pretrained(folder)
    inputs["decoder_input_ids"] = torch.full((PROMPTS, 1), START)
    best, example = choose_example(model, inputs, count)
    if name == "whisper":
        example |= {"features": inputs["input_features"][best].tolist(), "start": [START]}
    else:
        example["prompt"] = ids[best].tolist()
    (folder / "example.json").write_text(json.dumps(example))


def generate(folder: Path, suffix: str, open_session: Any, count: int) -> tuple[list[int], Any]:
    """Return the greedy tokens of the files of a dtype, and the session of the decoder."""
    import numpy as np

    example = json.loads((folder / "example.json").read_bytes())
    fixed: dict[str, Any] = {}
    ids = np.array([example.get("prompt", [])], np.int64)
    encoder = folder / "onnx" / f"encoder_model{suffix}.onnx"
    name = "model"
    if encoder.is_file():
        opened, name = open_session(encoder), "decoder_model_merged"
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        if "features" in example:
            feeds = {"input_features": np.array([example["features"]], np.float32)}
        inputs = {value.name: value.type for value in opened.get_inputs()}
        feeds = {key: _as_type(value, inputs[key]) for key, value in feeds.items() if key in inputs}
        fixed = {"encoder_hidden_states": opened.run(None, feeds)[0], "encoder_attention_mask": np.ones_like(ids)}
        ids = np.array([[START]], np.int64)
    decoder = open_session(folder / "onnx" / f"{name}{suffix}.onnx")
    inputs = {value.name: value for value in decoder.get_inputs()}
    outputs = [value.name for value in decoder.get_outputs()]
    past = {
        key: _as_type(np.zeros([1, value.shape[1], 0, value.shape[3]]), value.type)
        for key, value in inputs.items()
        if key.startswith("past_key_values")
    }
    tokens: list[int] = []
    length = ids.shape[1]
    for _ in range(count):
        feeds = {
            **fixed,
            "input_ids": ids,
            "attention_mask": np.ones([1, length], np.int64),
            "position_ids": np.arange(length - ids.shape[1], length)[None],
        }
        feeds = {key: _as_type(value, inputs[key].type) for key, value in feeds.items() if key in inputs}
        results = dict(zip(outputs, decoder.run(None, {**feeds, **past}), strict=True))
        past = {key: results.get(key.replace("past_key_values", "present"), value) for key, value in past.items()}
        scores = results["logits"][0, -1].astype(np.float32)
        scores[END] = -np.inf
        tokens.append(int(scores.argmax()))
        ids, length = np.array([[tokens[-1]]]), length + 1
    return tokens, decoder


def _as_type(array: Any, name: str) -> Any:
    import numpy as np

    return array.astype({"tensor(float)": np.float32, "tensor(float16)": np.float16}.get(name, np.int64))


def run_in_ort(folder: Path, suffix: str, options: argparse.Namespace) -> dict[str, Any]:
    """Generate on WebGPU or, without a library of the provider, on the CPU; return tokens and counts."""
    import onnx
    import onnxruntime as ort

    if not options.ep_library:
        tokens, _ = generate(
            folder, suffix, lambda path: ort.InferenceSession(path, providers=["CPUExecutionProvider"]), options.tokens
        )
        return {"tokens": tokens}
    with tempfile.TemporaryDirectory() as profiles:
        tokens, decoder = generate(
            folder, suffix, lambda path: provider_session(path, options.ep_library, Path(profiles)), options.tokens
        )
        events = json.loads(Path(decoder.end_profiling()).read_text(encoding="utf-8"))
    (decoder_file,) = [path for path in (folder / "onnx").glob(f"*model*{suffix}.onnx") if _is_decoder(path, suffix)]
    nodes = len(onnx.load(decoder_file, load_external_data=False).graph.node)
    return {"tokens": tokens, "nodes": nodes, **count_last_run(events)}


def _is_decoder(path: Path, suffix: str) -> bool:
    return path.stem in (f"model{suffix}", f"decoder_model_merged{suffix}")


def run_process(command: list[str], options: argparse.Namespace, *, in_halves: bool = False) -> dict[str, Any]:
    """Run a command; return the JSON of its last line, or the last line of its error as the problem."""
    if in_halves:
        if not options.half_command:
            return {"problem": NO_HALVES}
        command = [*shlex.split(options.half_command), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"problem": _last_line(done) or f"ended with {done.returncode}"}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"tokens": found} if isinstance(found, list) else dict(found)


def build(checkpoint: Path, output: Path, *layout: str) -> str:
    """Build a checkpoint, unless it was built before; return the reason of a failure, empty on success."""
    if (output / "build_manifest.json").is_file():
        return ""
    command = [sys.executable, "-m", "winml.modelkit", "build", "-m", str(checkpoint), "-o", str(output), "-q"]
    done = subprocess.run([*command, "--no-verify", *layout], capture_output=True, text=True, check=False)
    errors = [line.partition(": ")[2] for line in done.stderr.splitlines() if line.startswith("error")]
    return "" if done.returncode == 0 else next(iter(errors), _last_line(done))


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the errors of a process, else of its output."""
    return next(iter(reversed((done.stderr.strip() or done.stdout.strip()).splitlines())), "")


@contextmanager
def opened_page(folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """Serve a folder, and open it in Chromium with WebGPU in software; yields the browser."""
    from browser import WEBGPU, opened_browser, served
    from readers import BROWSERS, find_program, folder_of

    packages = Path(options.node_modules or folder_of("transformers.js") / "node_modules")
    links = {"transformers.min.js": packages / "@huggingface/transformers/dist/transformers.min.js"}
    for end in ("mjs", "wasm"):
        file = f"ort-wasm-simd-threaded.asyncify.{end}"
        links[file] = packages / "onnxruntime-web/dist" / file
    for name, target in links.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    (folder / "index.html").write_text(PAGE)
    command = find_program(BROWSERS)
    if command is None:
        raise SystemExit("Chromium is not installed")
    with served(folder) as address, opened_browser(command, WEBGPU) as browser:
        browser.open(address)
        browser.run("new Promise(done => { const id = setInterval(() => loaded && (clearInterval(id), done()), 20); })")
        yield browser


def run_in_browser(browser: Any, name: str, folder: str, dtype: str, device: str, example: Any, count: int) -> Any:
    """Generate with transformers.js in a browser."""
    if device == "webgpu" and dtype in HALF_DTYPES:
        return {"problem": NO_HALVES}
    kind = {"t5": "AutoModelForSeq2SeqLM", "whisper": "WhisperForConditionalGeneration"}
    arguments = (kind.get(name, "AutoModelForCausalLM"), folder, dtype, device, example, count)
    found = browser.run(f"write({', '.join(map(json.dumps, arguments))})")
    return {"problem": found} if isinstance(found, str) else {"tokens": found}


def run_in_genai(name: str, dtype: str, checkpoint: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Build a dtype for onnxruntime-genai, and generate with it on WebGPU."""
    import numpy as np

    if dtype not in GENAI_OPTIONS:
        return {"problem": "no such weights"}
    output = folder / f"{name}-{dtype}-genai"
    library = ("--ep-library", options.ep_library)
    if problem := build(checkpoint, output, "--layout", "genai", "--ep", "webgpu", *library, *GENAI_OPTIONS[dtype]):
        return {"problem": problem}
    example = json.loads((checkpoint / "example.json").read_bytes())
    features = ""
    if "features" in example:
        features = str(output / "features.npy")
        np.save(features, np.array([example["features"]], np.float16 if dtype in HALF_DTYPES else np.float32))
    prompt = json.dumps(example.get("prompt", example.get("start")))
    path = options.ep_library.partition("=")[2]
    command = [options.genai_python, "-c", GENAI, path, str(output), prompt, str(options.tokens), features]
    return run_process(command, options, in_halves=dtype in HALF_DTYPES)


def measure(name: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each dtype of a model."""
    from winml.modelkit.builds.layouts.transformers_js_dtypes import DTYPES

    checkpoint, output, measured = folder / name, folder / f"{name}-js", folder / f"{name}.json"
    if measured.is_file():
        rows: list[dict[str, Any]] = json.loads(measured.read_bytes())
        return rows
    if not (checkpoint / "example.json").is_file():
        save = save_checkpoint if name in MODELS else save_encoder_decoder
        save(name, checkpoint, options.tokens)
    problem = build(checkpoint, output, "--layout", "transformers.js", "--dtypes", options.dtypes)
    if problem:
        raise SystemExit(f"{name}: {problem}")
    example = json.loads((checkpoint / "example.json").read_bytes())
    (output / "example.json").write_text(json.dumps(example))
    rows = []
    with opened_page(folder, options) as browser:
        for dtype in options.dtypes.split(","):
            suffix = DTYPES[dtype].suffix
            process = [sys.executable, __file__, "--run", str(output), "--suffix", suffix]
            process += ["--tokens", str(options.tokens)]
            of_provider = [*process, "--ep-library", options.ep_library]
            results = {
                "cpu": run_process(process, options),
                "webgpu": run_process(of_provider, options, in_halves=dtype in HALF_DTYPES),
                **{
                    f"browser_{device}": run_in_browser(
                        browser, name, output.name, dtype, device, example, options.tokens
                    )
                    for device in ("wasm", "webgpu")
                },
                "genai": run_in_genai(name, dtype, checkpoint, folder, options),
            }
            rows.append({"model": name, "dtype": dtype, "example": example["tokens"], **results})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    measured.write_text(json.dumps(rows))
    return rows


def _cell(result: dict[str, Any], expected: list[int]) -> str:
    """Return the words of one reader: the number of equal tokens, or the problem."""
    if "problem" in result:
        return str(result["problem"])
    written = result["tokens"]
    equal = next((place for place, pair in enumerate(zip(written, expected, strict=False)) if len({*pair}) > 1), None)
    return "equal" if equal is None and len(written) == len(expected) else f"differs at token {equal or 0}"


def _table_row(row: dict[str, Any]) -> dict[str, str]:
    counted = row["webgpu"] if "nodes" in row["webgpu"] else None
    fallbacks = ", ".join(f"{name} {count}" for name, count in counted["fallbacks"].items()) if counted else ""
    return {
        "model": f"{row['model']} {row['dtype']}",
        "nodes": str(counted["nodes"]) if counted else "",
        "WebGPU nodes a token": str(counted["on_provider"]) if counted else "",
        "copies a token": str(counted["copies"]) if counted else "",
        "CPU nodes a token": f"{counted['on_cpu']}{f' ({fallbacks})' if fallbacks else ''}" if counted else "",
        **{heading: _cell(row[reader], row["example"]) for reader, heading in READERS.items()},
    }


def main() -> None:
    """Measure and print."""
    names = (*MODELS, *ENCODER_DECODERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--genai-python", help="Python of an environment with onnxruntime-genai")
    parser.add_argument("--ep-library", help="webgpu=PATH of the provider's library")
    parser.add_argument("--half-command", help="command before those that need an adapter with 16-bit floats")
    parser.add_argument("--node-modules", help="folder with transformers.js; else that of make readers")
    parser.add_argument("--models", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--dtypes", default="fp32,fp16,q8,q4,q4f16", help="of transformers.js")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to generate")
    parser.add_argument("--folder", type=Path, help="where to work; builds and results that are there are used again")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--suffix", default="", help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run_in_ort(options.run, options.suffix, options)))
        return
    if not (options.genai_python and options.ep_library):
        raise SystemExit(f"--genai-python and --ep-library are required; {PROVIDER} is a plug-in")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        rows = [row for name in options.models.split(",") for row in measure(name, options, folder.resolve())]
    table = markdown_table(list(map(_table_row, rows)))
    print("\n".join(table), flush=True)
    publish(options, {"benchmark": "gpu_readers", "rows": rows}, table)


if __name__ == "__main__":
    main()
