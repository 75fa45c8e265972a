"""JSON of every record, compared with the declaration of its class."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import importlib
import json
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from architecture.sources import imports, modules
from winml.modelkit import InputTensorSpec, OutputTensorSpec
from winml.modelkit.builds.manifest_records import BuildManifest
from winml.modelkit.onnx.specs import DynamicDimension
from winml.modelkit.profile.latency import LatencyResult
from winml.modelkit.records import Record, record_keys
from winml.modelkit.tags.torch_modules import CallTrace
from winml.modelkit.tags.tree import ModuleTree
from winml.modelkit.verdicts import Verdict

ENTRY = "entry"
"""Metadata key of a field."""
texts = st.text(max_size=4)
numbers = st.floats() | st.floats(-9, 9)
json_values = st.none() | st.booleans() | st.integers() | numbers | texts | st.lists(numbers, max_size=2)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    Any: json_values,
    str: texts,
    int: st.integers(1, 2**40),
    float: numbers,
    bool: st.booleans(),
    type(None): st.none(),
    Path: texts.map(Path),
    datetime: st.datetimes(),
    dict[str, Any]: st.dictionaries(texts, json_values, max_size=2),
    InputTensorSpec: st.just(InputTensorSpec(name="ids", shape=(1, "sequence"), dtype="int64", value_range=(0, 9))),
    DynamicDimension: st.just(DynamicDimension(name="sequence", max=64, example=8)),
    OutputTensorSpec: st.just(OutputTensorSpec(name="logits", shape=(1, 2), dtype="float32")),
    ModuleTree: st.just(ModuleTree((), CallTrace())),
    BuildManifest: st.just(BuildManifest(status="done", files=("model.onnx",))),
}


def _subclasses(kind: type[Record]) -> Iterator[type[Record]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _record_classes() -> dict[str, type[Record]]:
    for module in modules():
        if any(found.target.startswith("winml.modelkit.records.") for found in imports(module.tree)):
            importlib.import_module(f"winml.modelkit.{module.name}")
    return {kind.__name__: kind for kind in _subclasses(Record) if kind.__module__.startswith("winml.")}


CLASSES = _record_classes()
GENERATED = [kind for kind in CLASSES.values() if kind.as_record is Record.as_record]


@functools.cache
def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Draw values of a type; collections have at least one item, since empty records are not made."""
    if hint in LEAVES:
        return LEAVES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(_values, arguments))
    if origin is tuple and arguments[-1] is not ...:
        return st.tuples(*map(_values, arguments))
    if origin in (tuple, list, collections.abc.Sequence):
        return st.lists(_values(arguments[0]), min_size=1, max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(_values(arguments[0]), min_size=1, max_size=2)
    if origin in (dict, collections.abc.Mapping):
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), min_size=1, max_size=2)
    assert dataclasses.is_dataclass(hint), hint
    return st.deferred(lambda: _instances(hint))


@functools.cache
def _instances(kind: Any) -> st.SearchStrategy[Any]:
    if kind is Verdict:  # what would decide it belongs to an undecided verdict alone
        words = st.text(max_size=4)
        decided = st.builds(Verdict.of, words, st.booleans(), words)
        return decided | st.builds(Verdict.undecided, words, words, st.text(min_size=1, max_size=4))
    if kind is LatencyResult:  # times are positive and finite
        times = st.floats(1e-3, 1e6)
        return st.builds(LatencyResult, st.lists(times, min_size=1, max_size=3).map(tuple), times)
    hints = typing.get_type_hints(kind, localns=dict(CLASSES))
    fields = {item.name: hints[item.name] for item in dataclasses.fields(kind) if item.init}
    # A record that contains records of its class ends at the first.
    return st.builds(
        kind,
        **{
            name: st.just(()) if typing.get_args(hint) == (kind, ...) else _values(hint)
            for name, hint in fields.items()
        },
    )


def _forms(kind: Any) -> dict[str, Any]:
    """Return attribute → declared form, for attributes with a form of their own."""
    members = {name: getattr(member, "fget", member) for base in kind.__mro__ for name, member in vars(base).items()}
    forms = {name: getattr(member, ENTRY, None) for name, member in members.items()}
    forms |= {item.name: item.metadata.get(ENTRY) for item in dataclasses.fields(kind)}
    return {name: form for name, form in forms.items() if form is not None}


def _rounded(value: Any, digits: int) -> bool:
    if isinstance(value, dict):
        return all(_rounded(item, digits) for item in value.values())
    if isinstance(value, list):
        return all(_rounded(item, digits) for item in value)
    return not isinstance(value, float) or value == round(value, digits)


@pytest.mark.parametrize("kind", GENERATED, ids=lambda kind: kind.__name__)
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_record_is_written_as_its_class_declares(kind: type[Record], data: st.DataObject) -> None:
    """The record is valid JSON, its keys are in the declared order, and numbers are rounded as declared."""
    record = data.draw(_instances(kind)).as_record()
    assert record == json.loads(json.dumps(record, allow_nan=False))
    declared = record_keys(kind)
    assert [key for key in declared if key in record] == [key for key in record if key in declared]
    forms = _forms(kind)
    assert any(form.inline for form in forms.values()) or set(record) <= set(declared)
    for name, form in forms.items():
        if form.digits is not None and not form.within:
            assert _rounded(record.get(form.key or name), form.digits)


@pytest.mark.parametrize("name", ["CandidateFacts", "MeasuredVariant", "Architecture", "CellResult", "TextTokens"])
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_stored_record_is_read_unchanged(name: str, data: st.DataObject) -> None:
    """A record survives JSON text, including tuples, nested records and NaN."""
    record = data.draw(_instances(CLASSES[name]))
    again = CLASSES[name].from_fields(json.loads(json.dumps(dataclasses.asdict(record))))
    assert repr(record) == repr(again)
    with pytest.raises(ValueError, match="unknown_entry"):
        CLASSES[name].from_fields({**dataclasses.asdict(record), "unknown_entry": 1})


def test_second_dataclass_decorator_is_refused() -> None:
    """The decorator would drop the declared entries of fields, since the first one keeps only their defaults."""
    with pytest.raises(TypeError, match="delete its @dataclass"):

        @dataclasses.dataclass(frozen=True)
        class Kept(Record):
            count: int = 0
