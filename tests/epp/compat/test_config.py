"""Configurations of plugins: the picker starts if all plugins may be left out, and refuses any other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.compat.flags import TABLE, UNFOLLOWED, UNNEEDED, ConfigError, check_config
from treeline_epp.options import options_of

PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"
GIE = "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\n"
DEFAULT = """
featureGates: [dataLayer]
plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}, {name: cached, type: prefix-cache-scorer},
  {type: metrics-data-source, parameters: {scheme: http, path: /metrics, insecureSkipVerify: true}}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: cached, weight: 3}, {pluginRef: max-score-picker}]
dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]}
saturationDetector: {pluginRef: utilization-detector}
"""
ROW = re.compile(r"^\| (`[a-z][a-z0-9-]*`(?:, `[a-z][a-z0-9-]*`)*) \| (as here|no effect|refused) \|", re.MULTILINE)
FATES = {
    name.strip("`"): fate for names, fate in ROW.findall(PAGE.read_text(encoding="utf-8")) for name in names.split(", ")
}
"""What the page says of each plugin."""


def why(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(text)
    return str(error.value)


def test_the_migration_page_lists_every_plugin_that_may_be_left_out() -> None:
    assert {name for name, fate in FATES.items() if fate != "refused"} == UNNEEDED
    assert len(FATES) > len(UNNEEDED)


@pytest.mark.parametrize("name", sorted(name for name, fate in FATES.items() if fate == "refused"))
def test_a_plugin_that_routes_requests_is_refused(name: str) -> None:
    told = f"{name}: refused; {TABLE} says why, and what to use instead"
    assert why(f"{GIE}plugins: [{{type: queue-scorer}}, {{type: {name}, name: mine}}]") == told
    assert why(f"{GIE}schedulingProfiles: [{{name: a, plugins: [{{pluginRef: {name}}}]}}]") == told


def test_a_plugin_does_not_hide_behind_the_name_of_another() -> None:
    two = "plugins: [{name: a, type: decode-filter}, {name: a, type: queue-scorer}]"
    assert why(f"{GIE}{two}") == "two of the plugins are called 'a'"
    assert why(f"{GIE}schedulingProfiles: {{name: a}}") == (
        "no configuration: Expected `array | null`, got `object` - at `$.schedulingProfiles`"
    )


def test_a_configuration_with_https_probes_is_refused() -> None:
    told = why(f"{GIE}plugins: [{{type: metrics-data-source, parameters: {{scheme: https}}}}]")
    assert told == "metrics-data-source: scheme https is not known here: engines are asked over plain HTTP only"
    check_config(f"{GIE}plugins: [{{type: metrics-data-source, parameters: {{scheme: http}}}}, {{type: tokenizer}}]")
    check_config(f"{GIE}plugins: [{{type: metrics-data-source, parameters: {{scheme: null}}}}]")


def test_a_decode_filter_is_refused() -> None:
    assert FATES["decode-filter"] == "refused"
    assert "decode-filter: refused" in why(f"{GIE}plugins: [{{type: decode-filter}}]")


def test_the_reference_default_configuration_is_accepted_and_reported_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(GIE + DEFAULT)
    for words in (["--config-file", str(file)], [f"--config-text={GIE}{DEFAULT}"]):
        flag = words[0].partition("=")[0]
        assert options_of(["--pool-name", "p", *words]).ignored == (f"{flag}: {UNFOLLOWED}",)
    assert options_of(["--pool-name", "p", "--config-text="]).ignored == ()


def test_the_picker_does_not_start_with_a_refused_or_missing_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused = f"--config-text={GIE}plugins: [{{type: decode-filter}}]"
    for words, told in (([refused], TABLE), (["--config-file", str(tmp_path / "none")], "No such file")):
        with pytest.raises(SystemExit) as end:
            options_of(["--pool-name", "p", *words])
        assert end.value.code == 2
        assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no configuration: it is empty"),
        ("a: [", "no YAML"),
        ("[]", "Expected `object`, got `array`"),
        ("kind: Pool", "Invalid enum value 'Pool' - at `$.kind`"),
        (GIE + "plugins:\n- {name: a}", "missing required field `type`"),
        (GIE + "plugins:", ""),
        (GIE + "plugins: 7", "Expected `array | null`, got `int`"),
        (GIE + "plugins: [{type: mine}]", "mine: refused"),
        (GIE + "parser: {pluginRef: mine}", "mine: refused"),
        (GIE + "flowControl: {defaultPriorityBand: {fairnessPolicyRef: mine}}", "mine: refused"),
        (GIE + "schedulingProfiles: [{name: a}, {name: b}]", "leave one"),
        (GIE + "kind: EndpointPickerConfig", "occurs twice - at `$.kind`"),
        (GIE + "plugins: &a [*a]", "more than"),
        (GIE + "#" * (1024 * 1024), "more than 1048576 characters"),
    ],
)
def test_an_unreadable_configuration_is_refused(text: str, told: str) -> None:
    if told:
        assert told in why(text)
    else:
        check_config(text)


NAMES = ("kind", "plugins", "type", "name", "schedulingProfiles", "pluginRef", "dataLayer", "sources", "parser")
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(sorted(FATES)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
)


@settings(max_examples=60)
@given(TREES)
def test_any_document_is_passed_or_refused(tree: Any) -> None:
    document = tree if isinstance(tree, dict) else {"plugins": tree}
    text = json.dumps({**document, "kind": "EndpointPickerConfig"})
    try:
        check_config(text)
    except ConfigError:
        return
    assert {plugin["type"] for plugin in document.get("plugins") or ()} <= UNNEEDED


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        check_config(text)
