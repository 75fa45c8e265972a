"""Writes docs/reference/build_config.md from the build config, so that both agree.

python scripts/build_config_reference.py [--check]
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from winml.modelkit.builds.config import SCHEMA_VERSION, WinMLBuildConfig
from written_document import write_or_check

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "build_config.md"

HEAD = f"""# Build config

Written by `scripts/build_config_reference.py` from the code; change it there. `winml config` writes such a file,
`winml config --check FILE` checks one, `winml config --schema` prints its JSON Schema. This is schema version
{SCHEMA_VERSION}; files of earlier versions are read.

A section that is null skips its stage. An unknown key is an error. `winml build` reads all of it, `winml export
-c` the sections `loader` and `export`, `winml optimize -c` the section `optim`, `winml quantize -c` the section
`quant`, `winml compile -c` the section `compile`; a build that is done is judged by `eval`.
"""


def reference() -> str:
    """Return the document."""
    schema = WinMLBuildConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    parts = [HEAD, _table(schema)]
    done: set[str] = set()
    waiting = _references(schema)
    while waiting:
        name = waiting.pop(0)
        if name not in done:
            done.add(name)
            parts.append(
                f"## {name}\n\n{_text(definitions[name].get('description', ''))}\n\n{_table(definitions[name])}"
            )
            waiting += _references(definitions[name])
    return "\n".join(parts)


def _table(schema: dict[str, Any]) -> str:
    properties = schema.get("properties", {})
    if not properties:
        return ""
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    required = schema.get("required", ())
    for key, value in properties.items():
        default = "required" if key in required else _default(value)
        rows.append(f"| `{key}` | {_kind(value)} | {default} | {_text(value.get('description', ''))} |")
    return "\n".join(rows) + "\n"


def _default(value: dict[str, Any]) -> str:
    if "default" not in value:
        return ""
    # The defaults of a section stand in its own table.
    return "`{}`" if isinstance(value["default"], dict) else f"`{_json(value['default'])}`"


def _kind(value: dict[str, Any]) -> str:
    """Describe the allowed values of a key."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(option) for option in value["anyOf"]))
    if "const" in value:
        return f"`{_json(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{_json(option)}`" for option in value["enum"])
    if value.get("type") == "array":
        items = value.get("items") or (value.get("prefixItems") or [{}])[0]
        return f"list of {_kind(items)}"
    if value.get("type") == "object":
        inner = value.get("additionalProperties")
        return f"object of {_kind(inner)}" if isinstance(inner, dict) and inner else "object"
    bounds = [f"{word} {value[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in value]
    return " ".join([str(value.get("type", "anything")), *bounds])


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for key, value in schema.items() if key != "$defs" for name in _references(value)]
    return [name for value in schema for name in _references(value)] if isinstance(schema, list) else []


def _json(value: Any) -> str:
    return json.dumps(value)


def _text(docstring: str) -> str:
    """Return a docstring as Markdown in one line, in the words of JSON."""
    words = docstring.replace("``", "`").replace(":data:", "").replace(":class:", "").replace("|", "\\|")
    return " ".join(re.sub(r"\bNone\b", "Null", words).split())


if __name__ == "__main__":
    write_or_check(TARGET, reference())
