"""The documentation's site: pages look as on a forge, load nothing from other hosts, and their links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from markdown import Markdown
from markdown_it import MarkdownIt
from mkdocs.config import load_config
from mkdocs.utils import meta
from treeline_tools.site import GithubLists

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
CONFIG = load_config(str(ROOT / "mkdocs.yml"))


def structure(html: str) -> Counter[str]:
    return Counter(re.findall(r"<(li|h\d|tr|blockquote|pre)\b", html))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_a_forges_lists_tables_and_blocks(page: str) -> None:
    text, _ = meta.get_data((ROOT / page).read_text())
    extensions = [GithubLists(), *CONFIG.markdown_extensions]
    site = Markdown(extensions=extensions, extension_configs=CONFIG.mdx_configs).convert(text)
    forge = MarkdownIt("commonmark").enable("table").render(text)
    assert structure(site) == structure(forge)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_one_short_file_that_says_how_it_is_run(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 60
    assert f"python examples/{script.name}" in text.split('"""')[1]
    assert f"../examples/{script.name}" in (ROOT / "docs" / "examples.md").read_text()


@pytest.mark.parametrize(
    ("page", "shown", "result", "metric"),
    [
        ("index", "51.6 ms", "routing", "routing.ttft_ms.p50.treeline"),
        ("index", "309 ms", "routing", "routing.ttft_ms.p50.random"),
        ("guides/one-gpu", "1.04 times", "vllm", "offline.vs_vllm.llama8b"),
        ("guides/one-gpu", "1.11\ntimes", "vllm", "offline.vs_vllm.qwen3_0_6b"),
        ("guides/many-replicas", "99.9 %", "routing-sim", "routing.multi-turn.hit_vs_oracle"),
        (
            "guides/from-sgl-router",
            "1.2 times",
            "routing-peers",
            "routing.peers.generated-shared-prefix.ttft_p90_vs.sglang-router",
        ),
        (
            "guides/from-sgl-router",
            "1.09 times",
            "routing-peers",
            "routing.peers.generated-shared-prefix.ttft_p90_vs.smg",
        ),
        ("guides/from-gie", "0.57 times", "gie", "gie.vs_gie.rps_per_core.1kb"),
        ("guides/from-gie", "1.98 times", "gie", "gie.vs_gie.rps_per_core.30kb"),
        ("guides/from-gie", "3.61 times", "gie", "gie.vs_gie.rps_per_core.220kb"),
    ],
)
def test_a_figure_on_a_page_equals_the_measured_one(page: str, shown: str, result: str, metric: str) -> None:
    rows = json.loads((ROOT / "bench" / "results" / f"{result}.json").read_text())["rows"]
    (value,) = [row["value"] for row in rows if row["metric"] == metric]
    number, _, unit = shown.partition(" ") if " " in shown else shown.partition("\n")
    assert shown in (ROOT / "docs" / f"{page}.md").read_text()
    assert float(number) == pytest.approx(value * 100 if unit == "%" else value, rel=5e-3)


def build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / ".venv" / "bin" / "mkdocs", "build", "--site-dir", root / "site"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a repository of two pages, a room and a sample, with the site's own configuration."""
    for path, text in {
        "docs/index.md": "# Home\n\n[there](other.md#a-part), [room](../room/README.md), [one](../samples/pool.yaml)\n",
        "docs/other.md": "# Other\n\n## A part\n\n[samples](../samples), ![a plot](../bench/plot.svg)\n",
        "room/README.md": "# Room\n\n[home](../docs/index.md)\n",
        "samples/pool.yaml": "kind: InferencePool\n",
        "bench/plot.svg": "<svg xmlns='http://www.w3.org/2000/svg'/>\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    config, _, _ = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    hook = tmp_path / "tools" / "treeline_tools" / "site.py"
    hook.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "treeline_tools" / "site.py", hook)
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: [docs/index.md, docs/other.md, room/README.md]\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


@pytest.mark.deep
def test_links_to_files_and_folders_lead_to_pages_that_show_them(small: Path) -> None:
    done = build(small)
    assert done.returncode == 0, done.stderr
    assert "InferencePool" in (small / "site" / "samples" / "pool.yaml" / "index.html").read_text()
    assert "InferencePool" in (small / "site" / "samples" / "index.html").read_text()
    assert (small / "site" / "bench" / "plot.svg").is_file()
    assert 'href="other/#a-part"' in (small / "site" / "index.html").read_text()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("docs/other.md", "[gone](gone.md)"),
        ("docs/other.md", "[no such part](index.md#nothing)"),
        ("docs/other.md", "## B\n\n[here](#c)"),
        ("room/README.md", "[gone](../samples/gone.yaml)"),
        ("docs/other.md", "![a plot](../bench/gone.svg)"),
        ("docs/forgotten.md", "# In no navigation"),
    ],
)
def test_a_broken_link_is_an_error_that_names_the_page(small: Path, page: str, text: str) -> None:
    with (small / page).open("a") as file:
        file.write(f"\n{text}\n")
    done = build(small)
    assert done.returncode == 1
    assert page in done.stderr


@pytest.mark.deep
def test_the_whole_site_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "docs.sh", "--build", tmp_path], check=True)
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)", page.read_text()
        )
        assert loaded == [], page
    for sheet in tmp_path.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text()) == [], sheet
