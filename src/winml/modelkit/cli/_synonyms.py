"""Words of other tools: commands, options and values, and what each is in winml.

Data only; ``_translation.py`` translates command lines with it. Names of options are written without dashes, in lower
case and with hyphens: ``--Max_Tokens`` and ``-maxTokens`` are ``max-tokens``.
"""

from __future__ import annotations

from collections.abc import Mapping

SERVING = "serve server serving"
COMMANDS: Mapping[str, str] = {
    "convert save onnx to-onnx to_onnx import trace convert-model capture-onnx-graph": "export {}",
    "benchmark bench time latency speed measure throughput trtexec benchmark-app perf-test profile-model": "perf {}",
    "profile profiler": "perf {} --by-module",
    "info show summary describe print stats analyze analyse dump io": "inspect {}",
    "netron visualize visualise graph plot draw browse explore": "view {} -o page.html",
    "tree layers modules hierarchy": "inspect {} --hierarchy",
    "list-tasks tasks": "inspect --list-tasks",
    "optimise simplify fuse slim simplification sim onnxsim onnxslim optimizer fold constant-folding": "optimize {}",
    "shape-infer transform": "optimize {}",
    "quant quantise quantization compress": "quantize {}",
    "quantize-dynamic": "quantize {} --mode dynamic",
    "quantize-static": "quantize {} --mode qdq",
    SERVING: "build MODEL -o built; build MODEL -o built --layout genai",
    "deploy package pack bundle make pipeline auto-opt": "build {}",
    "predict infer inference classify embed execute pipe": "run {}",
    "chat": "generate {} --chat -p Hello",
    "complete text llm ask": "generate {}",
    "validate test check accuracy-check": "verify {}; inspect {}; compare REFERENCE {}; eval {} --dataset DATA",
    "evaluate score accuracy": "eval {}",
    "cmp": "compare {}",
    "split cut slice subgraph surgeon": "extract {}",
    "autotune search auto tuning session-params-tuning tune-session-params": "tune {}",
    "ovc mo": "compile {} --ep openvino",
    "tag": "retag {}",
    "init plan config-init config-create config-new config-show": "config {}",
    "clean prune clear cache-clear cache-delete cache-rm cache-remove cache-prune cache-purge": "cache clean",
    "cache-list cache-show cache-dir cache-info cache-size cache-path": "cache ls",
    "list-models list-builds models builds ls": "cache ls",
    "devices providers env environment doctor hardware list list-eps list-devices list-providers eps system": "sys",
    "version V": "--version",
}  # fmt: skip
"""Words of other tools → command lines of winml, separated by semicolons; ``{}`` stands for the arguments."""
OF_ONNX = "optimize {}; quantize {} -p fp16"
"""Command lines that convert an ONNX file."""
RUNTIMES = "onnxruntime ort optimum optimum-cli olive transformers genai winml polygraphy yolo"
"""Words before the command in other tools: ``optimum-cli onnxruntime quantize``."""
SUBCOMMANDS: Mapping[str, str] = {"export": "onnx pytorch torch hf", "config": "init create new show generate"}
"""Command → words before the model in other tools: ``optimum-cli export onnx``."""
POSITIONALS: Mapping[str, str] = {
    "run": "file data", "perf": "vs with", "compare": "with vs original optimized", "diff": "old new with",
    "view": "vs", "retag": "original optimized", "sweep": "models config",
}  # fmt: skip
"""Command → options of other tools whose value is a positional argument."""
NEIGHBORS: Mapping[str, str] = {
    "export": "build", "optimize": "quantize compile", "quantize": "build", "inspect": "perf",
    "run": "generate perf", "generate": "run", "diff": "compare", "compile": "quantize", "verify": "compare",
}  # fmt: skip
"""Command → commands of the same arguments that take what it does not take."""
FOLLOWING: Mapping[str, tuple[str, str]] = {"export": ("optimize", "--level"), "optimize": ("quantize", "-p")}
"""Command → command that continues with its file, and the option whose words a user adds to the first command."""

OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("json", "format_", "-f json"),
    ("quantize quantization quant qtype weight-format quant-type type dtype data-type float-type", "precision",
     "-p {}"),
    ("precision p type data-type torch-dtype", "dtype", "--dtype {}"),
    ("group group-size groupsize blocksize block int4-block-size", "block_size", "--block-size {}"),
    ("avx2 avx512 avx512-vnni arm64", "mode", "--mode dynamic"),
    ("dynamic-quant dynamic-quantization", "mode", "--mode dynamic"),
    ("static-quant", "mode", "--mode qdq"),
    ("load-in-8bit", "precision", "-p int8"),
    ("load-in-4bit", "precision", "-p int4"),
    ("method quant-method quantization-mode quant-mode quant-format scheme", "mode", "--mode {}"),
    ("calibration-method calibrate-method calib-method", "method", "--method {}"),
    ("sym", "symmetric", "--symmetric"),
    ("asym", "symmetric", "--asymmetric"),
    ("o4 ofast fuse fusion simplify model-type", "level", "--level full"),
    ("recipe", "config", "-c {}"),
    ("O optimize opt-level optimization-level graph-optimization-level optimize-level", "level", "--level {}"),
    ("opset-version target-opset", "opset_version", "--opset {}"),
    ("passes list-passes", "list_", "--list"),
    ("feature pipeline pipeline-tag", "task", "-t {}"),
    ("monolith", "cache", "--no-cache"),
    ("with-past use-past past use-cache kv-cache", "cache", "--cache"),
    ("clean fresh force-rebuild no-cache", "rebuild", "--rebuild"),
    ("torchscript legacy", "exporter", "--no-dynamo"),
    ("no-dynamic-axes static-shapes no-dynamic static", "fixed_sizes", "--fixed-sizes"),
    ("text input question", "prompt", "-p {}"),
    ("source img picture i input", "image", "--image {}"),
    ("i in input p prompt", "text", "--text {}"),
    ("input in model model-name model-name-or-path model-id source src i", "model", "-m {}"),
    ("onnx onnx-model hf-model pretrained checkpoint ckpt", "model", "-m {}"),
    ("out output output-model export dest dst dir outdir outfile save save-as", "output", "-o {}"),
    ("output-json json-output export-json", "output", "-o {}"),
    ("force yes y", "overwrite", "--overwrite"),
    ("batch b", "batch_size", "--batch-size {}"),
    ("batch b batch-size", "dynamic_batch", "--dynamic-batch"),
    ("axes dynamic dynamic-shape dynamic-axes", "dynamic_batch", "--dynamic-batch --dynamic-seq-len"),
    ("min-shapes max-shapes", "opset_version", "--dynamic-batch --dynamic-seq-len"),
    ("min-shapes max-shapes", "fixed_sizes", "--dynamic-batch --dynamic-seq-len"),
    ("provider execution-provider backend target hardware e", "ep", "--ep {}"),
    ("soc-model soc", "ep_options", "--ep-options soc_model={}"),
    ("provider-option", "ep_options", "--ep-options {}"),
    ("embed-context embed-mode", "embed", "--embed"),
    ("runs num-runs n-runs avg-runs repeat repetitions rounds steps count", "iterations", "--iterations {}"),
    ("iter niter loop n i r", "iterations", "--iterations {}"),
    ("warm-up warmup-runs num-warmup warmups", "warmup", "--warmup {}"),
    ("time seconds secs t", "duration", "--duration {}"),
    ("time time-limit time-budget timeout minutes max-time", "budget_minutes", "--budget {}"),
    ("metric objective goal optimize-for", "target", "--target {}"),
    ("num-threads n-threads nthreads intra-op-num-threads intra-op x", "threads", "--threads {}"),
    ("calib calibration calibrate calib-data calib-dataset calibration-dataset data", "calibration_data",
     "--calibration-data {}"),
    ("data data-set dataset-name eval eval-data test csv", "dataset", "--dataset {}"),
    ("load-inputs inputs input-file npz data input text texts", "input_data", "--input-data {}"),
    ("max-drop max-accuracy-drop accuracy-drop max-accuracy-loss", "max_drop", "--max-drop accuracy={}"),
    ("layer-wise module-wise", "by_module", "--by-module"),
    ("ignore skip exclude keep keep-float blacklist nodes-to-exclude layers-to-skip layers-to-exclude", "exclude",
     "--exclude {}"),
    ("float-modules", "exclude", "--exclude {}"),
    ("check validate", "verify", "--verify"),
    ("only nodes-to-quantize modules-to-quantize", "include", "--include {}"),
    ("per-layer per-module per-node per-op by-layer layerwise layers modules profile breakdown dump-profile",
     "by_module", "--by-module"),
    ("tree layers modules", "hierarchy", "--hierarchy"),
    ("all detailed details", "verbose", "-v"),
    ("layer submodule block part node name from", "module", "--module {}"),
    ("tolerance tol atol rtol eps max-error max-diff conf confidence t", "threshold", "--threshold {}"),
    ("report", "with_report", "--with-report"),
    ("html", "report", "--report {}"),
    ("prompt input-text sentence", "text", "--text {}"),
    ("wav sound", "audio", "--audio {}"),
    ("labels candidate-labels", "label", "--label {}"),
    ("top-k topk k", "top", "--top {}"),
    ("question", "inputs", "--input question={}"),
    ("context", "inputs", "--input context={}"),
    ("text-pair text2", "inputs", "--input text_pair={}"),
    ("max-tokens max-output-tokens max-new num-tokens tokens", "max_new_tokens", "--max-new-tokens {}"),
    ("max-length length max n-predict num-predict n", "max_new_tokens", "--max-new-tokens {}"),
    ("greedy", "temperature", "--temperature 0"),
    ("temp t", "temperature", "--temperature {}"),
    ("against ref reference compare vs", "baseline", "--baseline {}"),
    ("num-samples nsamples n-samples num-calib-samples calib-samples calibration-samples", "samples", "--samples {}"),
    ("n-calib calib-size calibration-size", "samples", "--samples {}"),
    ("limit max-samples examples num-examples n", "samples", "--samples {}"),
    ("no-check no-validate skip-validation no-verification", "verify", "--no-verify"),
    ("external use-external-data external-data-format", "external_data", "--external-data"),
    ("dry", "dry_run", "--dry-run"),
    ("silent", "quiet", "--quiet"),
)  # fmt: skip
"""Options of other tools, the parameter of a winml command, and its spelling; ``{}`` stands for the value.

The first row whose parameter the command has, and whose value it takes, applies.
"""
OMITTED: Mapping[str, tuple[str, str]] = {
    "atol": ("rtol", "--threshold is a relative error, as --rtol is."),
    "trials": ("", "--budget MINUTES limits a search."),
    "n-trials": ("", "--budget MINUTES limits a search."),
    "warmUp": ("", "--warmUp is in milliseconds; --warmup is a number of runs."),
}
"""Options without a counterpart, as typed or plain → option beside which that is so (empty: always), and a remark."""
NOUNS = ("-name", "-path", "-file", "-dir", "-folder", "-layers", "-modules", "-module", "-nodes")
"""Endings of names that say no more: ``--image-path`` is ``image``, ``--ignore-layers`` is ``ignore``."""
VAGUE_WORDS = frozenset({
    "all", "and", "data", "do", "dir", "file", "for", "in", "input", "list", "max", "min", "model", "name", "names",
    "num", "of", "only", "out", "output", "path", "per", "size", "style", "to", "type", "use", "with",
})  # fmt: skip
"""Words of a name that mean no option alone."""
NEGATIONS = ("skip-", "without-", "disable-")
"""Beginnings that are ``no-`` in winml: ``--skip-verify``."""
COLUMN = "-column"
"""Ending of an option with the column of a role: ``--text-column``."""
STARTS = ("num", "list", "enable", "disable")
"""Beginnings that other tools omit: ``--beams`` is ``--num-beams``."""
SIZES: Mapping[str, str] = {
    "batch batch-size bs b": "batch_size",
    "h": "height",
    "w": "width",
    "seq seq-len seq-length sequence-length seqlen max-length max-len max-seq-len max-seq-length": "sequence_length",
    "max-position context-length text-length": "sequence_length",
    "image image-size imgsz img-size resize resolution input-size size": "height width",
}
"""Options of other tools → keys of ``--shape-config``; each key is an option of other tools as well."""
SHAPES = "input-sizes input-shape input-shapes shape shapes overwrite-input-shape opt-shapes max-shapes data-shape"
"""Options with shapes of inputs: ``--shapes=input_ids:1x128,attention_mask:1x128``."""
WEIGHT_BITS = "bits nbits wbits w-bits weight-bits num-bits weight-type weight-dtype weights-type weights"
ACTIVATION_BITS = (
    "abits a-bits act-bits activation-bits activation-type activation-dtype activation activations activations-type "
    "act-type act-dtype"
)
"""Options whose values, together, are a precision: 8 and 16 are ``w8a16``."""
OPTIONS_AS_VALUE = "extra-options"
"""Options whose value is an option: ``--extra_options int4_block_size=32``."""

REQUIRED: Mapping[str, tuple[str, str]] = {
    "--algorithm": ("-p --precision --mode", "-p int4"),
    "--max-drop": ("--dataset", "--dataset DATA"),
}
"""Option → options of which it requires one, and what is added without them: ``--awq`` alone is ``int4``."""
VALUES: Mapping[str, str] = {
    "4": "int4", "4bit": "int4", "nf4": "int4", "8": "int8", "8bit": "int8", "quint8": "uint8", "qint8": "int8",
    "half": "fp16", "float16": "fp16", "16": "fp16", "bfloat16": "bf16", "float32": "fp32", "f16": "fp16",
    "0": "none", "1": "basic", "o1": "basic", "2": "extended", "o2": "extended", "3": "full", "o3": "full",
    "99": "full", "all": "full", "max": "full", "cuda": "gpu", "static": "qdq", "md": "markdown",
}  # fmt: skip
"""Value in other tools → value of winml. ``q4``, ``Q4_K_M``, ``i8`` are ``int4`` and ``int8``."""
