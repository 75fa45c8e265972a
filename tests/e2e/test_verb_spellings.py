"""Common spellings: short flags, options before the verb, and a verb with a typo."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from e2e.in_process import run_here
from winml.modelkit.cli import _synonyms
from winml.modelkit.cli.main import COMMANDS, VERBS

SHORT = {"--task": "-t", "--format": "-f", "--device": "-d", "--precision": "-p", "--model": "-m", "--output": "-o"}
OTHERWISE = {"generate": {"--prompt": "-p"}}
"""Verb → its different short forms: a built model has no precision to choose."""


def _options(verb: str) -> list[click.Parameter]:
    command: click.Command = VERBS[verb]
    return [option for option in command.params if isinstance(option, click.Option)]


@pytest.mark.parametrize("verb", COMMANDS)
def test_short_flags_mean_the_same_in_every_verb(verb: str) -> None:
    """A long option with a short form has it in every verb, and the short form has no other meaning."""
    for option in _options(verb):
        for long, short in SHORT.items():
            if any(OTHERWISE.get(verb, {}).get(name) == short for name in option.opts):
                assert not any(long in other.opts for other in _options(verb))
                continue
            assert (long in option.opts) == (short in option.opts), option.opts


def test_short_flags_are_read() -> None:
    """The help shows short flags, and their values are read."""
    assert "-p, --precision NAME" in run_here("config", "--help").out
    refused = run_here("config", "-m", "x", "-p", "int3", "-d", "tpu")
    assert "'-d' / '--device': 'tpu'" in refused.err
    assert '"kind": "tasks"' in run_here("inspect", "--list-tasks", "-f", "json").out
    assert "--task fill-maks" in run_here("inspect", "-m", "owner/name", "-t", "fill-maks").err


@pytest.mark.parametrize(
    ("arguments", "words", "ending"),
    [
        (("exprt", "-m", "x"), "'exprt'", "Type:\n  winml export -m x -o model.onnx\n"),
        (("qqq",), "'qqq'", "--help' shows"),
        (("export", "--modle", "x"), "--modle", "Type:\n  winml export --model x -o model.onnx\n"),
        (("-x",), "'-x'", "--help' shows"),
    ],
)
def test_verb_or_option_with_a_typo_is_met_with_the_nearest(
    arguments: tuple[str, ...], words: str, ending: str
) -> None:
    """The exit code is 2, with one sentence, and the line to type or the help that lists the names."""
    refused = run_here(*arguments)
    assert (2, "") == (refused.code, refused.out)
    assert words in refused.err
    assert ending in refused.err


def test_quiet_and_verbose_before_the_verb_equal_those_behind_the_verb(tmp_path: Path, small_file: Path) -> None:
    """A verb without the option says so."""
    quiet = run_here("-q", "optimize", "-m", small_file, "-o", tmp_path / "quiet.onnx")
    assert (0, "", "") == (quiet.code, quiet.out, quiet.err)
    assert run_here("-v", "inspect", small_file).out == run_here("inspect", small_file, "-v").out
    assert run_here("-v", "inspect", small_file).out != run_here("inspect", small_file).out
    for verb in (("sys",), ("cache", "ls")):
        refused = run_here("-q", *verb)
        assert (2, "") == (refused.code, refused.out)
        assert f"-q (--quiet) stands before the verb, and 'winml {' '.join(verb)}' does not take it" in refused.err


def test_completion_offers_verbs_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has the protocol of the shell."""
    monkeypatch.setenv("_WINML_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "winml ex")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert "plain,export\nplain,extract\n" == run_here().out
    monkeypatch.setenv("COMP_WORDS", "winml perf --by")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert "plain,--by-module\n" == run_here().out


ONE_MODEL = ("build", "compile", "config", "export", "optimize", "quantize", "tune")
"""Verbs of one model whose dry run needs no more than model and output."""


@pytest.mark.parametrize("verb", ONE_MODEL)
def test_model_is_positional_or_an_option(tmp_path: Path, small_bert: Path, small_file: Path, verb: str) -> None:
    """Both forms make the same plan."""
    model = small_bert if verb in ("build", "config", "export", "tune") else small_file
    output = tmp_path / ("out" if verb in ("build", "tune") else "out.json" if verb == "config" else "out.onnx")
    rest = ("-o", output, "--dry-run", "-f", "json", *(("--ep", "cpu") if verb == "compile" else ()))
    outcomes = [run_here(verb, *named, *rest) for named in ((model,), ("-m", model), ("--model", model))]
    assert [0, 0, 0] == [outcome.code for outcome in outcomes], outcomes[0].err
    assert outcomes[0].out == outcomes[1].out == outcomes[2].out
    assert str(model) in outcomes[0].out


@pytest.mark.parametrize(
    "verb", sorted({*COMMANDS} - {"cache", "compare", "diff", "retag", "run", "sweep", "sys", "view"})
)
def test_two_models_for_a_verb_of_one_are_named(verb: str) -> None:
    """A positional model and ``-m`` with the same value are one model."""
    if verb == "generate":  # after -m, positional values are prompts
        assert "other.onnx:" in run_here("generate", "-m", "other.onnx", "text").err
        return
    refused = run_here(verb, "one.onnx", "-m", "other.onnx", *_required(verb))
    assert (2, "") == (refused.code, refused.out)
    assert all(word in refused.err for word in ("'one.onnx'", "-m, 'other.onnx'"))
    assert "two models" not in run_here(verb, "one.onnx", "-m", "one.onnx", *_required(verb)).err


def _required(verb: str) -> tuple[str, ...]:
    values = {"dataset": "data.csv", "module": "Layer", "output": "out", "weights": "tuned"}
    required = [option for option in _options(verb) if option.required]
    return tuple(word for option in required for word in (option.opts[-1], values[str(option.name)]))


def test_verb_without_a_model_says_so() -> None:
    """The error is that of the missing model, whatever the verb."""
    for verb in (*ONE_MODEL, "eval", "extract", "generate", "inspect", "perf", "run"):
        refused = run_here(verb, *_required(verb), *(("--ep", "cpu") if verb == "compile" else ()))
        assert (2, "") == (refused.code, refused.out)
        assert "no model" in refused.err, verb


def test_pair_of_models_is_positional_or_follows_options(small_file: Path) -> None:
    """The order of the models is that of the command line."""
    plans = [
        run_here(verb, *words, "--dry-run").out
        for verb in ("compare", "diff")
        for words in ((small_file, "b.onnx"), ("-m", small_file, "-m", "b.onnx"), ("-m", small_file, "b.onnx"))
    ]
    assert plans[:1] * 3 == plans[:3]
    assert plans[3:4] * 3 == plans[3:]
    assert f"'{small_file}'" not in run_here("compare", "a.onnx").err
    assert "a.onnx:" in run_here("compare", "--model=a.onnx", "-m", "b.onnx").err


def test_text_after_the_model_is_its_input(small_file: Path) -> None:
    """A file is an image or audio by its suffix, and a second model is refused."""
    for named in ((small_file,), ("-m", small_file)):
        told = run_here("run", *named, "A dog runs.", "--dry-run")
        assert 0 == told.code, told.err
    for text in ("It ends with model.onnx", "x" * 5000):
        assert 0 == run_here("run", small_file, text, "--dry-run").code
    refused = run_here("run", small_file, "photo.jpg", "--dry-run")
    assert all(word in refused.err for word in ("'image'", "feature-extraction"))
    unnamed = run_here("run", small_file, "--input", "A dog", "--dry-run")
    assert (2, True) == (unnamed.code, "use --text 'A dog'" in unnamed.err), unnamed.err
    refused = run_here("run", small_file, small_file)
    assert (2, "") == (refused.code, refused.out)
    assert f"winml compare {small_file} {small_file}" in refused.err


def test_second_model_of_perf_is_measured_against_the_first(tmp_path: Path, small_file: Path) -> None:
    """The first model is the baseline; a third one is refused by name."""
    other = tmp_path / "other.onnx"
    other.write_bytes(small_file.read_bytes())
    plan = run_here("perf", small_file, other, "--dry-run").out
    assert plan == run_here("perf", other, "--baseline", small_file, "--dry-run").out
    assert str(small_file) in plan
    for words in ((other, "third.onnx"), (other, "--baseline", "third.onnx")):
        refused = run_here("perf", small_file, *words, "--dry-run")
        assert (2, "") == (refused.code, refused.out)
        assert "third.onnx" in refused.err
        assert f"winml perf {small_file} {other}" in refused.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("convert ckpt model.onnx", "export ckpt -o model.onnx"),
        ("convert model.onnx", "winml optimize model.onnx winml quantize model.onnx -p fp16 -o"),
        ("convert ckpt model.onnx --half --dynamic", "export ckpt --dtype fp16 --dynamic-batch --dynamic-seq-len -o"),
        ("benchmark model.onnx --runs 5", "perf model.onnx --iterations 5"),
        ("profile model.onnx", "perf model.onnx --by-module"),
        ("info model.onnx --json", "inspect model.onnx -f json"),
        ("validate model.onnx", "eval model.onnx --dataset DATA"),
        ("test built", "compare REFERENCE built"),
        ("serve built", "MODEL -o built"),
        ("serve built", "winml has no server"),
        ("predict built --text hello", "--text hello"),
        ("help quantize", "quantize --help"),
        ("quantize model.onnx q.onnx", "quantize model.onnx -o q.onnx"),
        ("quantize model.onnx --bits 4 -o q.onnx", "quantize model.onnx -p int4 -o q.onnx"),
        ("quantize model.onnx --int8", "quantize model.onnx -p int8"),
        ("quantize model.onnx --quantize=q4", "quantize model.onnx -p int4"),
        ("quantize model.onnx -p q4", "'int4'?"),
        ("optimize model.onnx -O2", "optimize model.onnx --level extended"),
        ("optimize model.onnx --level 2", "'extended'?"),
        ("inspect model.onnx --json", "inspect model.onnx -f json"),
        ("compile model.onnx --provider cpu", "compile model.onnx --ep cpu"),
        ("perf model.onnx --seq-len 64", "perf model.onnx --shape-config sequence_length=64"),
        ("generate built Hello --max_tokens=4", "Hello --max-new-tokens 4"),
        ("eval model.onnx reviews.csv", "eval model.onnx --dataset reviews.csv"),
        ("extract model.onnx Layer -o parts", "-o parts --module Layer"),
        ("quantize m.onnx --type int8", "quantize m.onnx -p int8 -o quantized.onnx"),
        ("tune ckpt --time 2m", "tune ckpt --budget 2 -o tuned"),
        ("tune ckpt -o tuned --budget 90s", "tune ckpt -o tuned --budget 1.5"),
        ("quantize m.onnx --bits 4 --group-size 32", "quantize m.onnx -p int4 --block-size 32"),
        ("quantize m.onnx --bits 4 --sparsity 0.5", "Type, without --sparsity: winml quantize m.onnx -p int4 -o"),
        (
            "quantize --sparsity 0.5 m.onnx --bits 4",
            "without --sparsity: winml quantize m.onnx -p int4 -o quantized.onnx",
        ),
        ("quantize --prune m.onnx q.onnx --bits 4", "without --prune: winml quantize m.onnx -p int4 -o q.onnx"),
        (
            "quantize --prune magnitude m.onnx q.onnx --bits 4",
            "without --prune: winml quantize m.onnx -p int4 -o q.onnx",
        ),
        ("build ckpt --output-dir built --dtype int8", "build ckpt --output built -p int8"),
        ("perf m.onnx --device cuda", "perf m.onnx --ep cuda"),
        ("export onnx --model ckpt --task fill-mask --opset 17 out.onnx", "--opset 17 -o out.onnx"),
        ("export ckpt --fp16 --optimize O2 -o m.onnx", "build ckpt -p fp16 --optimize -o m --level extended"),
        ("onnxruntime quantize --onnx_model built --avx512 -o q", "quantize -m built --mode dynamic -o q"),
        ("onnxruntime optimize --onnx_model m.onnx -O3 -o fast.onnx", "optimize -m m.onnx --level full -o fast.onnx"),
        ("quantize m.onnx --per_channel --calibration_data=x.npz -o q.onnx", "--per-channel --calibration-data x.npz"),
        ("quantize m.onnx q.onnx --weight-type int4 --groupsize 64", "-p int4 --block-size 64 -o q.onnx"),
        ("quantize m.onnx --num_calib_samples 32 --static -o q.onnx", "--samples 32 --mode qdq -o q.onnx"),
        ("auto-opt -m ckpt --precision int4 --device cpu", "without --device: winml build -m ckpt --precision int4 -o"),
        ("capture-onnx-graph -m ckpt -o m.onnx", "export -m ckpt -o m.onnx"),
        ("session-params-tuning -m m.onnx", "tune -m m.onnx -o tuned"),
        ("analyze --model m.onnx --ep qnn", "inspect --model m.onnx --ep qnn"),
        ("inspect m.onnx -e qnn", "inspect m.onnx --ep qnn"),
        ("simplify m.onnx small.onnx", "optimize m.onnx -o small.onnx"),
        ("optimizer --input m.onnx --output fast.onnx --opt_level 2", "-m m.onnx --output fast.onnx --level extended"),
        ("perf m.onnx -e cuda --repeat 100", "perf m.onnx --ep cuda --iterations 100"),
        ("perf m.onnx --batch_size=4 --sequence_length=0128", "--shape-config sequence_length=128"),
        ("perf m.onnx --duration 2min", "perf m.onnx --duration 120"),
        ("perf m.onnx --intra_op_num_threads 4 --warmup-runs 3", "--threads 4 --warmup 3"),
        ("eval m.onnx --dataset_name glue --limit 100", "eval m.onnx --dataset glue --samples 100"),
        ("eval m.onnx data.csv --provider cpu", "eval m.onnx --ep cpu --dataset data.csv"),
        ("compare a.onnx b.onnx --atol 0.01", "compare a.onnx b.onnx --threshold 0.01"),
        ("compare a.onnx b.onnx --per-layer", "compare a.onnx b.onnx --by-module"),
        ("run built --prompt hello", "run built --text hello"),
        ("run built --question why --context because", "--input question=why --input context=because"),
        ("run built --image-path cat.jpg --labels cat", "run built --image cat.jpg --label cat"),
        ("generate built --prompt hi -n 32 --temp 0.5", "--max-new-tokens 32 --temperature 0.5"),
        ("generate built hi --num-beams 4 --max_length 20", "--max-new-tokens 20"),
        ("export ckpt --precision fp16 -o m.onnx", "export ckpt --dtype fp16 -o m.onnx"),
        ("export ckpt --precision int8 -o m.onnx", "build ckpt --precision int8 -o m"),
        ("export ckpt --height 64 --width 32 -o m.onnx", "--shape-config height=64,width=32"),
        ("build ckpt built --no-dynamic-axes", "build ckpt --fixed-sizes -o built"),
        ("tune m.onnx --timeout 10 --n-trials 5", "without --n-trials: winml tune m.onnx --budget 10 -o tuned"),
        ("compile m.onnx --target cuda", "compile m.onnx --ep cuda -o compiled.onnx"),
        ("retag m.onnx changed.onnx --save tagged.onnx", "retag m.onnx changed.onnx -o tagged.onnx"),
        ("diff a.onnx b.onnx --json", "diff a.onnx b.onnx -f json"),
        ("export ckpt g01/", "export ckpt -o g01/model.onnx"),
        ("export ckpt", "export ckpt -o model.onnx"),
        ("build ckpt out.onnx", "build ckpt -o out"),
        ("export model=ckpt half=true imgsz=64", "--model ckpt --dtype fp16 --shape-config height=64,width=64 -o"),
        ("export ckpt m.onnx --image-size 224 160", "--shape-config height=224,width=160 -o m.onnx"),
        ("export ckpt m.onnx --input_shape=[1,3,64,32]", "--shape-config batch_size=1,height=64,width=32"),
        ("export ckpt m.onnx --shapes input_ids:1x32", "--input-specs 'input_ids=[1,32]' -o m.onnx"),
        ("perf m.onnx --shapes=input_ids:1x32", "perf m.onnx --shape-config input_ids:0=1,input_ids:1=32"),
        ("perf --onnx=m.onnx -hint latency -niter 20", "without -hint: winml perf -m m.onnx --iterations 20"),
        ("export ckpt m.onnx --batch-size dynamic", "export ckpt --dynamic-batch -o m.onnx"),
        ("export ckpt -output m.onnx", "export ckpt --output m.onnx"),
        ("optimize m.onnx --float16", "quantize m.onnx -p fp16 -o quantized.onnx"),
        ("optimize m.onnx --level ORT_ENABLE_ALL", "optimize m.onnx --level full"),
        ("quantize m.onnx q.onnx Q4_K_M", "quantize m.onnx -o q.onnx -p int4"),
        ("quantize m.onnx q.onnx --activation-type uint16 --weight-type int8", "quantize m.onnx -p w8a16 -o q.onnx"),
        ("quantize m.onnx q.onnx --format QDQ", "quantize m.onnx --mode qdq -o q.onnx"),
        ("quantize m.onnx q.onnx --w4a16 --awq", "quantize m.onnx -p w4a16 --algorithm awq -o q.onnx"),
        ("quantize m.onnx q.onnx --ignore-layers A B", "quantize m.onnx --exclude A --exclude B -o q.onnx"),
        ("quantize m.onnx q.onnx --extra_options int4_block_size=32", "quantize m.onnx --block-size 32 -o q.onnx"),
        ("diff a.onnx b.onnx --tolerance 1e-3", "compare a.onnx b.onnx --threshold 1e-3"),
        ("compare --reference a.onnx --candidate b.onnx", "compare a.onnx b.onnx"),
        ("eval built --data d.csv --text-column body", "eval built --dataset d.csv --columns text=body"),
        ("extract m.onnx --module A --outputs logits", "without --outputs: winml extract m.onnx --module A -o parts"),
        ("generate built hi --beams 2 --greedy", "generate built hi --num-beams 2 --temperature 0"),
        ("torch2onnx ckpt m.onnx", "export ckpt -o m.onnx"),
        ("bulid ckpt --no-quantize=true", "build ckpt --no-quant -o built"),
        ("cache clear", "winml cache clean"),
        ("list tasks", "winml inspect --list-tasks"),
        ("export help", "winml export --help"),
        ("quantize m.onnx", "quantize m.onnx -o quantized.onnx"),
        ("--models", "winml cache ls"),
        ("benchmark m.onnx --batch 1,8 --seq-len 64", "perf m.onnx --shape-config batch_size=8,sequence_length=64"),
        ("check model.onnx", "winml inspect model.onnx"),
        ("tune m.onnx --max-accuracy-drop 0.01 --trials 3", "tune m.onnx --max-drop accuracy=0.01 --dataset DATA -o"),
        ("tune m.onnx --max-drop 0.01", "tune m.onnx --max-drop accuracy=0.01 --dataset DATA -o tuned"),
        ("compare a.onnx b.onnx --input 'a text'", "winml compare has --input-data FILE and --dataset DATA."),
        ("run m.onnx --seed 0", "without --seed: winml run m.onnx"),
        ("run m.onnx --random-inputs --save-outputs out.npz", "winml run m.onnx --save out.npz"),
        (
            "compare a.onnx b.onnx --atol 1e-5 --rtol 1e-1",
            "without --atol: winml compare a.onnx b.onnx --threshold 1e-1",
        ),
        ("perf m.onnx -r 50 -x 2", "winml perf m.onnx --iterations 50 --threads 2"),
        ("trtexec --onnx=m.onnx --warmUp=200", "without --warmUp: winml perf -m m.onnx --warmUp is in milliseconds"),
        ("export onnx --model ckpt --optimize O2 --opset 17 out/", "winml optimize out/model.onnx --level extended"),
        ("optimize m.onnx --model_type bert --float16", "winml quantize optimized.onnx -p fp16 -o quantized.onnx"),
    ],
)
def test_words_of_other_tools_name_the_command_to_type(typed: str, meant: str) -> None:
    """All of a wrong command line is corrected at once; nothing is run. Every suggested line is parsed."""
    refused = run_here(*shlex.split(typed))
    assert (2, "") == (refused.code, refused.out)
    assert meant in " ".join(refused.err.split())
    lines = re.findall(r"^  winml (.+)$", refused.err, re.MULTILINE)
    assert bool(lines) == ("\nType" in refused.err)
    for verb, *words in map(shlex.split, lines):
        if verb in VERBS and "--help" not in words:
            VERBS[verb].make_context(verb, words)


def test_printed_lines_do_what_was_meant(here: Path, small_bert: Path, small_file: Path) -> None:
    """Each line is typed; nothing that was not typed is in a message."""
    typed = {
        f"export {small_bert} out/ --batch 2 -seq_len 8": "out/model.onnx",
        f"optimize {small_file} half.onnx --float16": "half.onnx",
        f"quantize {small_file} q.onnx --activation-type uint16 --weight_type=QInt8": "q.onnx",
        f"perf {small_file} --shapes=input_ids:2x8 -niter 2 --json out.json": "out.json",
        f"perf {small_file} --batch 1,8 --seq-len 8 -r 2 -x 1 --json sizes.json": "sizes.json",
        f"optimize {small_file} --model_type bert --float16 --num_heads 4": "quantized.onnx",
        "perf out/model.onnx --shapes=input_ids:4x8 --runs 2": "model.onnx",
    }
    for words, file in typed.items():
        refused = run_here(*words.split())
        assert (2, False) == (refused.code, (here / file).exists())
        for line in re.findall(r"^  winml (.+)$", refused.err, re.MULTILINE):
            done = run_here(*shlex.split(line))
            assert 0 == done.code, (line, done.err)
        assert (here / file).exists(), refused.err
    for option in ("-hint", "-input_size"):
        assert f"no such option {option}\n" in run_here("perf", small_file, option, "32").err
    assert "--model decoder" not in run_here("eval", small_file, "--submodel", "decoder").err


def test_third_model_of_a_comparison_is_no_output() -> None:
    """The output of a comparison is JSON."""
    refused = run_here("compare", "a.onnx", "b.onnx", "c.onnx")
    assert (2, False) == (refused.code, " -o " in refused.err), refused.err
    assert "compare a.onnx b.onnx -o c.json" in run_here("compare", "a.onnx", "b.onnx", "c.json").err


def test_every_synonym_leads_to_options_that_exist() -> None:
    """Each row of the table is the spelling of a parameter of a command, and each command line is one of ours."""
    commands = {name: VERBS[name] for name in COMMANDS}
    for names, parameter, spelling in _synonyms.OPTIONS:
        takers = [command for command in commands.values() if parameter in {param.name for param in command.params}]
        assert takers, names
        flags = [word for word in spelling.split() if word.startswith("-")]
        offered = [
            {name for param in command.params for name in (*param.opts, *param.secondary_opts)} for command in takers
        ]
        assert any({*flags} <= options for options in offered), spelling
        typed = {f"-{name}" if len(name) == 1 else f"--{name}" for name in names.split()}
        assert not any(typed <= options for options in offered), names
    for words, lines in _synonyms.COMMANDS.items():
        assert not {*words.split()} & {*COMMANDS}
        for line in lines.split("; "):
            assert line.split()[0] in {*COMMANDS, "--version"}
    assert {word for verbs in _synonyms.NEIGHBORS.values() for word in verbs.split()} <= {*COMMANDS}
