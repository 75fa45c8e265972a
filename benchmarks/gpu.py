"""Work of a decoder on a GPU provider for each token, beside onnxruntime-genai's builder.

Method. Checkpoints of small decoders (two layers, seeded weights that 4 bits represent) are written with a tokenizer.
Of several hundred prompts, one is taken whose first two candidates are far apart in PyTorch in every step, so that
rounding decides no token. For each model and precision these build the same checkpoint:

* ``python -m winml.modelkit build -m CHECKPOINT -o FOLDER --ep webgpu``, with ``--precision int4 --symmetric`` for int4
* the same with ``--layout genai``, whose programs pad texts on the right, as those of genai's builder do
* ``GENAI_PYTHON -m onnxruntime_genai.models.builder -i CHECKPOINT -o FOLDER -p PRECISION -e webgpu``, with 32-bit
  inputs and outputs

Each file then generates greedily in ONNX Runtime, in a new process: on the provider, and on the CPU. ONNX Runtime's
profile of the last token is counted: nodes that the provider ran, nodes that fell back to the CPU, and values copied
between nodes of the two. Caches, which stay on the device where a program binds them, are no such copies. The tokens of
both runs are compared. No time is measured: an adapter in software says nothing about the time on a GPU.

A table, then JSON. Needs ``onnxruntime-ep-webgpu`` and an adapter; with
``ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1`` and ``VK_DRIVER_FILES`` a Vulkan driver in software is one.

    python benchmarks/gpu.py --genai-python PYTHON [--ep-library webgpu=PATH] [--models llama,qwen3]
        [--precisions fp32,int4] [--tokens 8] [--folder DIR]

``PYTHON`` is that of an environment with onnxruntime-genai and torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import copy  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter  # noqa: E402
from typing import Any  # noqa: E402

from results import add_save_option, markdown_table, publish  # noqa: E402

OURS, OURS_FOR_GENAI, THEIRS = "winml", "winml --layout genai", "genai"
PROVIDER = "WebGpuExecutionProvider"
VOCABULARY, PROMPTS, PROMPT_TOKENS = 512, 512, 8
LEAST_MARGIN, NOISE = 0.08, 0.01
"""Distance of the first two candidates in standard deviations of the scores, and relative noise of weights, which may
also select another expert. Chosen: several times the rounding of activations to 8 bits."""
START, END = 1, 2
ENDS = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
SIZES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3", "mistral": "Mistral", "gemma3": "Gemma3",
    "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
"""Name of a model → start of its classes in transformers."""
WINDOW = 6
"""Tokens of a sliding window: shorter than the prompt, so that the window matters."""
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
}


def save_checkpoint(name: str, folder: Path, count: int) -> None:
    """Write a small checkpoint with a tokenizer of one word for each token, and ``example.json`` beside it.

    Args:
        name: Name of a model.
        folder: Folder of the checkpoint.
        count: Number of tokens that the example has.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    kind = f"{MODELS[name]}{'Text' * (name == 'gemma3')}Config"
    config = getattr(transformers, kind)(**{**SIZES, **ENDS, **CHANGES.get(name, {})})
    model = getattr(transformers, f"{MODELS[name]}ForCausalLM")(config).eval()
    fill_with_4_bits(model)
    model.save_pretrained(folder)
    ids = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    best, example = choose_example(model, {"input_ids": ids}, count)
    (folder / "example.json").write_text(json.dumps({**example, "prompt": ids[best].tolist()}))
    words = {"<unk>": 0, "<s>": START, "</s>": END, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a token of a text
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
    )
    fast.save_pretrained(folder)


def fill_with_4_bits(model: Any) -> None:
    """Give every 16 weights of a matrix all 4-bit values, so that 4 bits represent them, and vary biases and scales."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() == 1:  # biases, and scales of normalizations
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
        elif weight.numel() % 16 == 0:
            levels = torch.rand(weight.numel() // 16, 16, generator=generator).argsort(-1).reshape(weight.shape) - 8
            # Keeps the scale of activations: the levels have a standard deviation of 4.6.
            weight.data.copy_(levels * 2.0**-6)


def choose_example(model: Any, inputs: dict[str, Any], count: int) -> tuple[int, dict[str, Any]]:
    """Generate greedily for many examples in PyTorch, and choose the one in which rounding decides no token.

    Args:
        model: The model.
        inputs: Inputs of all examples. Tokens are appended to ``decoder_input_ids``, else to ``input_ids``.
        count: Number of tokens.

    Returns:
        Number of the example with the most different tokens of those that noise in the weights does not change, with
        its ``tokens`` and ``margin``, the smallest distance of two candidates in standard deviations of the scores.
    """
    import torch

    texts, margins = _generate_in_pytorch(model, inputs, count)
    noisy, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    for weight in noisy.parameters():
        weight.data *= 1 + NOISE * torch.randn(weight.shape, generator=generator)
    is_stable = (_generate_in_pytorch(noisy, inputs, count)[0] == texts).all(1) & (margins > LEAST_MARGIN)
    distinct = torch.tensor([len(set(text)) for text in texts.tolist()])
    best = int((distinct * is_stable + margins.clamp(max=0.5)).argmax())
    return best, {"tokens": texts[best].tolist(), "margin": float(margins[best])}


def _generate_in_pytorch(model: Any, inputs: dict[str, Any], count: int) -> tuple[Any, Any]:
    """Return the greedy tokens of all examples, and the smallest distance of the first two candidates of each."""
    import torch

    tokens, margins = [], torch.full((PROMPTS,), torch.inf)
    given, key = dict(inputs), "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    with torch.no_grad():
        for _ in range(count):
            scores = model(**given).logits[:, -1]
            scores[:, END] = -torch.inf  # readers are asked for all tokens
            first, second = scores.topk(2).values.T
            margins = torch.minimum(margins, (first - second) / scores[:, :END].std())
            tokens.append(scores.argmax(-1))
            given[key] = torch.cat([given[key], tokens[-1][:, None]], 1)
    return torch.stack(tokens, 1), margins


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


def count_in_process(model: Path, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate after the prompt of a checkpoint's example, in a separate process; return its report."""
    prompt = json.dumps(json.loads((checkpoint / "example.json").read_bytes())["prompt"])
    command = [sys.executable, __file__, "--count", str(model), "--prompt", prompt, "--tokens", str(options.tokens)]
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
        tokens = generate(session, options.prompt, options.tokens)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = len(onnx.load(model, load_external_data=False).graph.node)
    try:
        on_cpu = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        expected = generate(on_cpu, options.prompt, options.tokens)
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


def generate(session: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of a decoder after a prompt."""
    import numpy as np

    inputs = {value.name: value for value in session.get_inputs()}
    dtypes = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    past = {
        name: np.zeros([1, SIZES["num_key_value_heads"], 0, SIZES["head_dim"]], dtypes[value.type])
        for name, value in inputs.items()
        if name.startswith("past_key_values")
    }
    tokens: list[int] = []
    ids, length = np.array([prompt]), len(prompt)
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
        save_checkpoint(name, checkpoint, options.tokens)
    rows = []
    for who in (OURS, OURS_FOR_GENAI, THEIRS):
        output = folder / f"{name}-{precision}-{who.split()[-1] + '-layout' * (who == OURS_FOR_GENAI)}"
        problem = "" if (output / "model.onnx").is_file() else build(who, checkpoint, output, precision, options)
        report = {"problem": problem} if problem else count_in_process(output / "model.onnx", checkpoint, options)
        rows.append({"model": name, "precision": precision, "builder": who, **report})
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
    parser.add_argument("--tokens", type=int, default=8, help="tokens to generate")
    parser.add_argument("--folder", type=Path, help="where to work; builds that are there are used again")
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prompt", type=json.loads, help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.count:
        print(json.dumps(count_work(options.count, options)))
        return
    if not options.genai_python:
        raise SystemExit("--genai-python is missing: the Python of an environment with onnxruntime-genai")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name in options.models.split(","):
            for precision in options.precisions.split(","):
                rows += measure(name, precision, options, folder)
                print(rows[-3:], file=sys.stderr, flush=True)
    columns = {key: "" for row in map(_table_row, rows) for key in row}
    table = markdown_table([{**columns, **_table_row(row)} for row in rows])
    print("\n".join(table), flush=True)
    publish(options, {"benchmark": "gpu", "rows": rows}, table)


if __name__ == "__main__":
    main()
