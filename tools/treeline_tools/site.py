"""Hooks of MkDocs (mkdocs.yml): the site is the repository's own Markdown, where it lies.

A page's path in the site's sources is its path in the repository, so that MkDocs checks the same links that work in a
checkout. A link to a file that is no page, or to a folder, leads to a page that shows it.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any, Final

from markdown import Markdown
from markdown.blockprocessors import build_block_parser
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PICTURES: Final = (".svg", ".png")
_LINK: Final = re.compile(r"(?<=\]\()[^()\s#]+")
_ITEM: Final = re.compile(r" *([-*+]|\d+\.) ")
_LANGUAGES: Final = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".ipynb": "json"}


class GithubLists(Extension):
    """Lists as on GitHub: a paragraph may end where one begins, and what stands in one is indented by two columns.
    Python-Markdown wants an empty line, and four columns."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2
        md.parser = build_block_parser(md)
        after_code_blocks_are_taken_out = 24
        md.preprocessors.register(_ListsAfterText(md), "lists_after_text", after_code_blocks_are_taken_out)


class _ListsAfterText(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        made: list[str] = []
        in_list = False
        for line in lines:
            item = _ITEM.match(line) is not None
            if item and made and made[-1] and not in_list:
                made.append("")
            in_list = item or (bool(made and made[-1]) and bool(line) and in_list)
            made.append(line)
        return made


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """`markdown_extensions` of the file are names; ours is an object, and goes before all others."""
    extensions: list[Any] = config.markdown_extensions
    extensions.insert(0, GithubLists())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, the repository's pages and pictures, and what pages link to."""
    root = Path(config.config_file_path).parent
    kept = Files([file for file in files if not Path(file.abs_src_path or root).is_relative_to(config.docs_dir)])
    shown: set[str] = set()
    for path in _sources(root):
        _add(kept, File.generated(config, path, abs_src_path=str(root / path)))
        if path.endswith(".md"):
            text = (root / path).read_text()
            shown.update(target for link in _LINK.findall(text) if (target := _shown(root, path, link)))
    for path in sorted(shown):
        _add(kept, File.generated(config, _page_of(root, path), content=_listing(root, path)))
    return kept


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files and folders lead to their pages."""
    root, source = Path(config.config_file_path).parent, page.file.src_uri

    def led(match: re.Match[str]) -> str:
        target = _shown(root, source, match[0])
        return posixpath.relpath(_page_of(root, target), posixpath.dirname(source) or ".") if target else match[0]

    return _LINK.sub(led, markdown)


def _sources(root: Path) -> list[str]:
    """Pages and pictures that git tracks, or that are new and not ignored, without deleted ones."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if path.endswith((".md", *PICTURES)) and (root / path).is_file()]


def _add(files: Files, file: File) -> None:
    file.dest_uri = file.dest_uri.removeprefix("docs/")  # the site's own pages are at its top
    files.append(file)


def _shown(root: Path, source: str, link: str) -> str:
    """The file or folder that a link of the page `source` leads to and that needs a page, or ""."""
    if "://" in link or link.startswith(("/", "mailto:")) or link.endswith((".md", *PICTURES)):
        return ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return "" if path.startswith("..") or not (root / path).exists() else path


def _page_of(root: Path, path: str) -> str:
    if (root / path).is_dir():
        return f"{path}/README.md" if (root / path / "README.md").is_file() else f"{path}/index.md"
    return f"{path}.md"


def _listing(root: Path, path: str) -> str:
    """A page of a file's text, or of a folder's files."""
    place = root / path
    if place.is_dir():
        if (place / "README.md").is_file():
            return (place / "README.md").read_text()
        files = sorted(file for file in place.iterdir() if file.is_file())
        return f"# {path}\n\n" + "".join(f"## {file.name}\n\n{_fenced(file)}\n" for file in files)
    return f"# {path}\n\n{_fenced(place)}"


def _fenced(file: Path) -> str:
    return f"````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(errors='replace').rstrip()}\n````\n"
