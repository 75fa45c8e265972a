"""Selection of the dataset column for a role, such as ``text`` or ``label``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.fields import read_columns
from winml.modelkit.options import suggest

if TYPE_CHECKING:
    from winml.modelkit.samples.data_sets import DataSet
    from winml.modelkit.samples.text_files import TextFile

ROLE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "sentence1", "text1", "content", "review", "question1", "premise", "question"),
    "text_pair": ("text_pair", "sentence2", "text2", "question2", "hypothesis"),
    "label": ("label", "labels", "class", "target", "fine_label", "category", "intent"),
    "score": ("score", "similarity_score", "similarity", "label"),
    "image": ("image", "img", "picture", "photo"),
    "mask": ("annotation", "mask", "segmentation_mask", "label", "labels"),
    "objects": ("objects", "annotations"),
    "audio": ("audio", "speech", "recording"),
    "reference": ("text", "sentence", "transcription", "transcript", "normalized_text", "reference"),
    "tokens": ("tokens", "words"),
    "tags": ("ner_tags", "tags", "pos_tags", "chunk_tags", "labels"),
    "question": ("question", "query"),
    "context": ("context", "passage", "paragraph"),
    "answers": ("answers", "answer"),
}
"""Role → column names, the most common first. Chosen from datasets that model cards of the Hub evaluate on: glue,
squad, conll2003, imdb, stsb, imagenet, beans, common_voice, librispeech, coco, scene_parse."""
ROLES = tuple(ROLE_COLUMNS)
_FEATURE_TYPES = {"image": "Image", "audio": "Audio"}
"""Role → feature type; a column of any name is selected if it is the only column of this type."""


def parse_columns(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts ``role=column`` to role → column; a text may contain several pairs, separated by commas.

    >>> parse_columns(["text=review,label=stars"])
    {'text': 'review', 'label': 'stars'}

    Raises:
        UsageError: a text without ``=``, an unknown role, or a role that is named twice.
    """
    columns = read_columns(texts, opt.columns, hint=f"Roles: {', '.join(ROLES)}.")
    refuse_unknown_roles(columns)
    return columns


def refuse_unknown_roles(columns: Mapping[str, str]) -> None:
    """Refuse unknown roles.

    Raises:
        UsageError: names the nearest role.
    """
    for role in columns:
        if role not in ROLE_COLUMNS:
            raise UsageError(
                f"{opt.columns} {role}: no such role", hint=suggest(role, ROLES, also=f"Roles: {', '.join(ROLES)}.")
            )


def match_columns(
    data_set: DataSet | TextFile, roles: Sequence[str], *, optional: Sequence[str] = ()
) -> dict[str, str]:
    """Return the column of each role.

    Args:
        data_set: The dataset with its columns and the request of the user.
        roles: Required roles. Columns are assigned in this order.
        optional: Roles that are assigned if a column exists.

    Raises:
        UsageError: a requested column is missing, or a role has no column: lists the columns and the assignment.
    """
    request = data_set.request
    refuse_unknown_roles(request.columns)
    for role, column in request.columns.items():
        if column not in data_set.columns:
            raise UsageError(
                f"{request.option} {data_set.name}: no column {column!r}, which {opt.columns} sets for {role}",
                hint=suggest(column, data_set.columns, also=f"Its columns: {', '.join(data_set.columns)}."),
            )
    columns = {role: column for role, column in request.columns.items() if role in (*roles, *optional)}
    for role in (*roles, *optional):
        if role not in columns and (guess := _guess_column(role, data_set.features, set(columns.values()))) is not None:
            columns[role] = guess
    if missing_roles := [role for role in roles if role not in columns]:
        raise _missing_column_error(data_set, missing_roles[0], columns)
    return columns


def _guess_column(role: str, features: Mapping[str, object], used_columns: set[str]) -> str | None:
    """Return an unused column for a role, by name, else the only one of the role's type; `None` without a match."""
    columns = {name.lower(): name for name in reversed(list(features)) if name not in used_columns}
    names = (columns[name] for name in ROLE_COLUMNS[role] if name in columns)
    if role == "mask":
        names = (name for name in names if type(features[name]).__name__ == "Image")
    by_name = next(names, None)
    if by_name is not None or role not in _FEATURE_TYPES:
        return by_name
    typed_columns = [name for name in columns.values() if type(features[name]).__name__ == _FEATURE_TYPES[role]]
    return typed_columns[0] if len(typed_columns) == 1 else None


def _missing_column_error(data_set: DataSet | TextFile, role: str, columns: Mapping[str, str]) -> UsageError:
    guesses = ", ".join(f"{name} is {column}" for name, column in columns.items()) or "none"
    return UsageError(
        f"{data_set.request.option} {data_set.name}: no column for {role}; its columns: {', '.join(data_set.columns)}; "
        f"found: {guesses}",
        hint=f"Set it with {opt.columns} {role}=COLUMN. Recognized names: {', '.join(ROLE_COLUMNS[role])}.",
    )
