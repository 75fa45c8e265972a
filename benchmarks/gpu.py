"""Work of a decoder on a GPU provider for each token, beside onnxruntime-genai's builder.

Method. Checkpoints of small decoders (two layers, seeded random weights) are written with a tokenizer. For each model
and precision these build the same checkpoint:

* ``python -m winml.modelkit build -m CHECKPOINT -o FOLDER --ep webgpu``, with ``--precision int4 --symmetric`` for int4
* the same with ``--layout genai``, whose programs pad texts on the right, as those of genai's builder do
* ``GENAI_PYTHON -m onnxruntime_genai.models.builder -i CHECKPOINT -o FOLDER -p PRECISION -e webgpu``, with 32-bit
  inputs and outputs

Each file then generates greedily in ONNX Runtime, in a new process: on the provider, and on the CPU. ONNX Runtime's
profile of the last token is counted: nodes that the provider ran, nodes that fell back to the CPU, and values copied
between nodes of the two. Caches, which stay on the device where a program binds them, are no such copies. The tokens of
both runs are compared. No time is measured: an adapter in software says nothing about the time on a GPU.

With ``--dtypes``, the checkpoints are built once each for transformers.js, and the file of each dtype is counted in the
same way, without the builder of onnxruntime-genai.

A table, then JSON. Needs ``onnxruntime-ep-webgpu`` and an adapter; with
``ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1`` and ``VK_DRIVER_FILES`` a Vulkan driver in software is one.

    python benchmarks/gpu.py --genai-python PYTHON [--ep-library webgpu=PATH] [--models llama,qwen3]
        [--precisions fp32,int4] [--dtypes q4,fp16] [--tokens 8] [--folder DIR]

``PYTHON`` is that of an environment with onnxruntime-genai and torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter  # noqa: E402
from typing import Any  # noqa: E402

from results import add_save_option, markdown_table, publish  # noqa: E402

OURS, OURS_FOR_GENAI, THEIRS = "winml", "winml --layout genai", "genai"
PROVIDER = "WebGpuExecutionProvider"
VOCABULARY, PROMPT_TOKENS = 512, 8
SIZES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3", "mistral": "Mistral", "gemma3": "Gemma3",
    "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
"""Name of a model → start of its classes in transformers."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def save_checkpoint(name: str, folder: Path) -> None:
    """Write a small checkpoint with seeded random weights and a tokenizer of one word for each token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    kind = f"{MODELS[name]}TextConfig" if name == "gemma3" else f"{MODELS[name]}Config"
    config = getattr(transformers, kind)(**SIZES, **ends, **(EXPERTS if name.endswith("_moe") else {}))
    getattr(transformers, f"{MODELS[name]}ForCausalLM")(config).save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a token of a text
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
    )
    fast.save_pretrained(folder)


def build(who: str, checkpoint: Path, output: Path, precision: str, options: argparse.Namespace) -> str:
    """Build a checkpoint; return the reason of a failure, empty on success."""
    if who == THEIRS:
        command = [options.genai_python, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
        command += ["-o", str(output), "-p", precision, "-e", "webgpu", "--extra_options", "use_webgpu_fp32=true"]
    else:
        command = [sys.executable, "-m", "winml.modelkit", "build", "-m", str(checkpoint), "-o", str(output), "-q"]
        command += ["--layout", "genai"] if who == OURS_FOR_GENAI else []
        command += ["--ep", "webgpu", *(["--ep-library", options.ep_library] if options.ep_library else [])]
        command += ["--no-verify", *(["--precision", precision, "--symmetric"] if precision == "int4" else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]


def count_in_process(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate in a separate process; return its report."""
    command = [sys.executable, __file__, "--count", str(model), "--tokens", str(options.tokens)]
    command += ["--ep-library", options.ep_library] if options.ep_library else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"problem": done.stderr.strip().splitlines()[-1]}
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def count_work(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate on the provider and on the CPU; return the counts of the last token, and the equality of the tokens."""
    import onnx
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

    with tempfile.TemporaryDirectory() as folder:
        session = provider_session(model, options.ep_library, Path(folder))
        tokens = generate(session, options.tokens)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = len(onnx.load(model, load_external_data=False).graph.node)
    try:
        expected = generate(ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]), options.tokens)
    except (ort_state.InvalidArgument, ort_state.NotImplemented):  # inputs that only the provider's kernels take
        expected = None
    is_equal = None if expected is None else tokens == expected
    return {"nodes": nodes, **count_last_run(events), "equal_tokens": is_equal}


def provider_session(model: Path, library: str | None, profiles: Path) -> Any:
    """Open a model on the provider, with a profile of its runs.

    Args:
        model: The ONNX file.
        library: ``webgpu=PATH`` of the provider's library; None: the installed package.
        profiles: Folder of the profile.
    """
    import onnxruntime as ort

    if not any(device.ep_name == PROVIDER for device in ort.get_ep_devices()):
        path = library.partition("=")[2] if library else _installed_library()
        ort.register_execution_provider_library(PROVIDER, path)
    device = next(device for device in ort.get_ep_devices() if device.ep_name == PROVIDER)
    settings = ort.SessionOptions()
    settings.enable_profiling, settings.profile_file_prefix = True, str(profiles / model.stem)
    settings.add_provider_for_devices([device], {})
    return ort.InferenceSession(str(model), settings)


def _installed_library() -> str:
    import onnxruntime_ep_webgpu

    return str(onnxruntime_ep_webgpu.get_library_path())


def count_last_run(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the kernels of the last run by place, and list the operators that fell back."""
    start = max(event["ts"] for event in events if event["name"] == "model_run")
    kernels = [
        event["args"]
        for event in events
        if event["ts"] >= start and event["cat"] == "Node" and event["name"].endswith("_kernel_time")
    ]
    copies = [kernel for kernel in kernels if kernel["op_name"].startswith("Memcpy")]
    placed = Counter(kernel["provider"] == PROVIDER for kernel in kernels if kernel not in copies)
    fallbacks = Counter(
        kernel["op_name"] for kernel in kernels if kernel["provider"] != PROVIDER and kernel not in copies
    )
    return {
        "on_provider": placed[True],
        "on_cpu": placed[False],
        "copies": len(copies),
        "fallbacks": dict(fallbacks.most_common()),
    }


def generate(session: Any, count: int) -> list[int]:
    """Return the greedy tokens of a decoder for a fixed prompt."""
    import numpy as np

    inputs = {value.name: value for value in session.get_inputs()}
    dtypes = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    past = {
        name: np.zeros([1, SIZES["num_key_value_heads"], 0, SIZES["head_dim"]], dtypes[value.type])
        for name, value in inputs.items()
        if name.startswith("past_key_values")
    }
    tokens: list[int] = []
    ids = np.random.default_rng(0).integers(3, VOCABULARY, [1, PROMPT_TOKENS])
    length = PROMPT_TOKENS
    outputs = [value.name for value in session.get_outputs()]
    for _ in range(count):
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones([1, length], np.int64),
            "position_ids": np.arange(length - ids.shape[1], length)[None],
        }
        values = session.run(None, {**{name: value for name, value in feeds.items() if name in inputs}, **past})
        results = dict(zip(outputs, values, strict=True))
        past = {name: results[name.replace("past_key_values", "present")] for name in past}
        tokens.append(int(results["logits"][0, -1].argmax()))
        ids, length = np.array([[tokens[-1]]]), length + 1
    return tokens


def measure(name: str, precision: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Build a checkpoint with both builders, and count the work of their files."""
    checkpoint = folder / name
    if not checkpoint.exists():
        save_checkpoint(name, checkpoint)
    rows = []
    for who in (OURS, OURS_FOR_GENAI, THEIRS):
        output = folder / f"{name}-{precision}-{who.split()[-1] + '-layout' * (who == OURS_FOR_GENAI)}"
        problem = "" if (output / "model.onnx").is_file() else build(who, checkpoint, output, precision, options)
        report = {"problem": problem} if problem else count_in_process(output / "model.onnx", options)
        rows.append({"model": name, "precision": precision, "builder": who, **report})
    return rows


def measure_dtypes(name: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Build a checkpoint for transformers.js, and count the work of the file of each dtype."""
    from winml.modelkit.builds.layouts.transformers_js_dtypes import DTYPES

    checkpoint, output = folder / name, folder / f"{name}-dtypes"
    if not checkpoint.exists():
        save_checkpoint(name, checkpoint)
    command = [sys.executable, "-m", "winml.modelkit", "build", "-m", str(checkpoint), "-o", str(output), "-q"]
    command += ["--layout", "transformers.js", "--dtypes", options.dtypes, "--no-verify"]
    subprocess.run(command, check=True)
    rows = []
    for dtype in options.dtypes.split(","):
        report = count_in_process(output / "onnx" / f"model{DTYPES[dtype].suffix}.onnx", options)
        rows.append({"model": name, "precision": dtype, "builder": "winml --layout transformers.js", **report})
    return rows


def _table_row(row: dict[str, Any]) -> dict[str, str]:
    shown = {"model": f"{row['model']} {row['precision']}", "builder": row["builder"]}
    if "problem" in row:
        return {**shown, "nodes": row["problem"]}
    fallbacks = ", ".join(f"{name} {count}" for name, count in row["fallbacks"].items())
    return {
        **shown,
        "nodes": str(row["nodes"]),
        "WebGPU nodes a token": str(row["on_provider"]),
        "copies a token": str(row["copies"]),
        "CPU nodes a token": f"{row['on_cpu']}{f' ({fallbacks})' if fallbacks else ''}",
        "tokens equal to the CPU": {True: "yes", False: "no", None: "the CPU cannot run it"}[row["equal_tokens"]],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--genai-python", help="Python of an environment with onnxruntime-genai")
    parser.add_argument("--ep-library", help="webgpu=PATH of the provider's library; else the installed package")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--precisions", default="fp32,int4", help="of fp32, int4")
    parser.add_argument("--dtypes", default="", help="of transformers.js, instead of --precisions")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to generate")
    parser.add_argument("--folder", type=Path, help="where to work; builds that are there are used again")
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.count:
        print(json.dumps(count_work(options.count, options)))
        return
    if not (options.genai_python or options.dtypes):
        raise SystemExit("--genai-python is missing: the Python of an environment with onnxruntime-genai")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name in options.models.split(","):
            rows += measure_dtypes(name, options, folder) if options.dtypes else []
            for precision in [] if options.dtypes else options.precisions.split(","):
                rows += measure(name, precision, options, folder)
                print(rows[-3:], file=sys.stderr, flush=True)
    columns = {key: "" for row in map(_table_row, rows) for key in row}
    table = markdown_table([{**columns, **_table_row(row)} for row in rows])
    print("\n".join(table), flush=True)
    publish(options, {"benchmark": "gpu", "rows": rows}, table, case="dtypes" if options.dtypes else "")


if __name__ == "__main__":
    main()
