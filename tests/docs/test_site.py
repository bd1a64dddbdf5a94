"""The site: built without a warning, nothing loaded from another host, every link and anchor there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs", reason="the generator is not installed: pip install -c constraints.txt 'echelon[docs]'")

ROOT = Path(__file__).parents[2]
START = "index.html"
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("form", "action"), ("object", "data")}
MOST_CLICKS = 3
TASKS = {  # what a stranger wants: the page that answers, and what it must name
    "serve my model with the best drafter in 8 GB": ("serving.html", "echelon serve MODEL --memory 8GB"),
    "make my vLLM script faster": ("moving.html", "from echelon import LLM, SamplingParams"),
    "train a head for my model": ("training.html", "echelon train MODEL --method eagle"),
    "why is it slow": ("slow.html", "echelon bench step MODEL"),
    "what changed": ("changelog.html", "Nothing has been released yet"),
}


@dataclass
class Page(HTMLParser):
    """What a page loads, links to from its own text and calls its places."""

    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=set)
    text: str = ""
    is_own: bool = False  # inside the article, not in the navigation

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.is_own = self.is_own or tag == "article"
        self.loads += [value for name, value in found.items() if (tag, name) in LOADS]
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found and self.is_own:
            self.links.append(found["href"])

    def handle_endtag(self, tag: str) -> None:
        self.is_own = self.is_own and tag != "article"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # of the theme's future, not of this site
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    found = {}
    for path in site.rglob("*.html"):
        page = found[path.relative_to(site).as_posix()] = Page()
        page.feed(path.read_text("utf-8"))
    return found


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[str, Page]) -> None:
    assert len(pages) > 20
    assert {name: [a for a in page.loads if is_elsewhere(a)] for name, page in pages.items() if any(map(is_elsewhere, page.loads))} == {}
    for path in [*site.rglob("*.css"), *site.rglob("*.html")]:
        named = re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s]+)""", path.read_text("utf-8"))
        assert [address for address in named if is_elsewhere(address)] == [], path


def test_lists_are_lists(site: Path) -> None:
    """The generator wants an empty line before a list, and four spaces before one within another."""
    for path in site.rglob("*.html"):
        html = path.read_text("utf-8")
        assert re.findall(r"<p>[^<]*(?:<(?!/p>)[^<]*)*\n *[-*] ", html) == [], path.name
    nested = [line for line in (ROOT / "docs/benchmarks.md").read_text("utf-8").splitlines() if re.match(r" {1,3}- ", line)]
    assert nested == []


def test_links_and_anchors_are_there(pages: dict[str, Page], site: Path) -> None:
    for name, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            assert target.resolve().is_file(), f"{name}: {link}"
            if parts.fragment and target.suffix == ".html":
                there = pages[target.resolve().relative_to(site.resolve()).as_posix()]
                assert unquote(parts.fragment) in there.places, f"{name}: {link}"


def clicks(pages: dict[str, Page]) -> dict[str, int]:
    """How far each page is from the start, by links in the texts alone."""
    far, waiting = {START: 0}, deque([START])
    while waiting:
        name = waiting.popleft()
        for link in pages[name].links:
            target = urlsplit(link).path
            if target in pages and target not in far:
                far[target] = far[name] + 1
                waiting.append(target)
    return far


@pytest.mark.parametrize("task", TASKS)
def test_a_stranger_finds_the_answer(task: str, pages: dict[str, Page]) -> None:
    name, answer = TASKS[task]
    assert clicks(pages)[name] <= MOST_CLICKS
    assert answer in " ".join(pages[name].text.split())
