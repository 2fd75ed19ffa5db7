"""The chart's dashboards (`boards/`) as Grafana reads them: charts/treeline/files/dashboards/*.json.

Grafana's classic JSON model, schema version 36: every Grafana since 9 reads it.
https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from treeline_tools.boards import BOARDS
from treeline_tools.boards.base import Board, Panel

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 24, 8


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
        "templating": {"list": [_datasource(), _namespaces(board.presence)]},
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


def _namespaces(presence: str) -> dict[str, Any]:
    """Which namespaces; all includes processes that are scraped without that label, outside of Kubernetes."""
    return {
        "name": "namespace",
        "type": "query",
        "label": "Namespace",
        "datasource": _SOURCE,
        "query": f"label_values({presence}, namespace)",
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
        for column, panel in enumerate(panels):
            number += 1
            place = {"x": column * width, "y": top, "w": width, "h": _HEIGHT}
            yield {"id": number, "gridPos": place, **_graph(panel)}
        top += _HEIGHT


def _graph(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 0, "lineWidth": 1, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }
