"""Renders node times as custom node data for Model Explorer, which shows a heat map over the graph of a file.

Format: Model Explorer's guide to custom node data. Node ids are those of its ONNX adapter: the names of the nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from winml.modelkit.results.profiled_modules import ProfiledModules
from winml.modelkit.words import json_printable

__all__ = ["node_data_json", "node_data_record"]

GRADIENT = ({"stop": 0, "bgColor": "#ffffff"}, {"stop": 0.5, "bgColor": "#fdd49e"}, {"stop": 1, "bgColor": "#d7301f"})
"""Chosen: white to red, which is readable without distinguishing red from green."""
UNNAMED_GRAPH = "<main>"
"""Specified: the ONNX adapter's name of a graph without a name."""


def node_data_json(profiled: ProfiledModules) -> str:
    """Return the node data of a profiled model as JSON text."""
    return json_printable(json.dumps(node_data_record(profiled.graph_name, profiled.node_ms), ensure_ascii=False))


def node_data_record(graph_name: str, milliseconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the object that Model Explorer loads beside a model.

    Args:
        graph_name: Name of the graph in the file.
        milliseconds: Time per run of each node of the file, by its name.
    """
    return {
        graph_name or UNNAMED_GRAPH: {
            "results": {name: {"value": value} for name, value in milliseconds.items()},
            "gradient": list(GRADIENT),
        }
    }
