"""The chart's dashboards (`boards/`) as Grafana reads them: charts/treeline/files/dashboards/*.json.

Grafana's classic JSON model, schema version 36: every Grafana since 9 reads it.
https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from string import ascii_uppercase
from typing import Any, Final

from treeline_tools.boards import BOARDS
from treeline_tools.boards.base import Board, Kind, Panel, Query, Variable

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT, _STAT_HEIGHT = 24, 8, 4


def documents() -> dict[str, str]:
    """File name → JSON."""
    return {f"{board.uid}.json": json.dumps(_model(board), indent=1, ensure_ascii=False) + "\n" for board in BOARDS}


def _model(board: Board) -> dict[str, Any]:
    return {
        "uid": board.uid,
        "title": board.title,
        "description": "Metrics are explained in docs/metrics.md of Treeline.",
        "tags": ["treeline"],
        "style": "dark",
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 36,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *map(_variable, board.variables)]},
        "annotations": {"list": []},
        "links": [
            {
                "title": "Treeline",
                "type": "dashboards",
                "tags": ["treeline"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
            }
        ],
        "panels": list(_panels(board)),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "hide": 0}


def _variable(variable: Variable) -> dict[str, Any]:
    """All includes series without the label: processes outside of Kubernetes have none of Kubernetes' labels."""
    return {
        "name": variable.name,
        "type": "query",
        "label": variable.title,
        "datasource": _SOURCE,
        "query": f"label_values({variable.metric}, {variable.label})",
        "regex": variable.regex,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all", "selected": True},
        "hide": 0,
    }


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    number = top = 0
    for title, panels in board.rows.items():
        number += 1
        row = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": row, "panels": []}
        top += 1
        width = _COLUMNS // len(panels)
        height = _STAT_HEIGHT if all(panel.kind == "stat" for panel in panels) else _HEIGHT
        for column, panel in enumerate(panels):
            number += 1
            place = {"x": column * width, "y": top, "w": width, "h": height}
            yield {"id": number, "gridPos": place, **_panel(panel)}
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "targets": [
            _target(panel, query, letter) for letter, query in zip(ascii_uppercase, panel.queries, strict=False)
        ],
        **_KINDS[panel.kind](panel),
    }


def _target(panel: Panel, query: Query, letter: str) -> dict[str, Any]:
    target = {"refId": letter, "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
    if panel.kind == "table":
        return target | {"instant": True, "range": False, "format": "table"}
    return target | {"format": "heatmap"} if panel.kind == "heatmap" else target


def _lines(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 0, "lineWidth": 1, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _stat(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "text", "value": None}]
    if panel.alarm is not None:
        steps.append({"color": "red", "value": panel.alarm})
    defaults = {"unit": panel.unit, "noValue": "–", "thresholds": {"mode": "absolute", "steps": steps}}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False, "fields": ""},
        },
    }


def _heatmap(panel: Panel) -> dict[str, Any]:
    """The buckets are Prometheus' own, so nothing is left to calculate."""
    scheme = {"mode": "scheme", "scheme": "Blues", "fill": "dark-blue", "scale": "exponential", "exponent": 0.5}
    return {
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {
            "calculate": False,
            "color": {**scheme, "steps": 64, "reverse": False},
            "yAxis": {"unit": panel.unit},
            "cellGap": 1,
            "filterValues": {"le": 1e-9},
            "legend": {"show": False},
            "tooltip": {"show": True, "yHistogram": False},
        },
    }


def _table(panel: Panel) -> dict[str, Any]:
    """A row for each set of labels, a column for each label and each query. A query without a name has no column."""
    columns = {f"Value #{letter}": query.legend for letter, query in zip(ascii_uppercase, panel.queries, strict=False)}
    if len(columns) == 1:
        columns["Value"] = panel.queries[0].legend  # Grafana's name for the only one
    hidden = {"Time": True} | {column: True for column, name in columns.items() if not name}
    units = {query.legend: query.unit for query in panel.queries if query.unit}
    return {
        "fieldConfig": {
            "defaults": {"unit": panel.unit},
            "overrides": [
                {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
                for name, unit in units.items()
            ],
        },
        "options": {"showHeader": True},
        "transformations": [
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {"excludeByName": hidden, "renameByName": {c: n for c, n in columns.items() if n}},
            },
        ],
    }


_KINDS: Final[dict[Kind, Callable[[Panel], dict[str, Any]]]] = {
    "timeseries": _lines,
    "stat": _stat,
    "heatmap": _heatmap,
    "table": _table,
}
