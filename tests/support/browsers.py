"""A real browser for tests of the server's page: this machine's Chromium, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Of WCAG 2: the ratio of the luminances of a text and of what lies behind it, for every text that is shown; [ratio, text], lowest first.
CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => {
    const [r, g, b] = channels(colour);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return channels(colour)[3] === 0 ? behind(element.parentElement) : colour;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    if (!text || !element.checkVisibility() || element.matches(":disabled")) continue;
    const [a, b] = [luminance(getComputedStyle(element).color), luminance(behind(element))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser; skips where it or Chromium is missing."""
    reason = "the page is tested in a browser: pip install playwright"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("the page is tested in a browser: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path)
        yield browser
        browser.close()
