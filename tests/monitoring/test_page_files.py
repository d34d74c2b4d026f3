"""The page's files: what a browser may do with them, and that they fit together."""

from __future__ import annotations

import re

import pytest

from gpuinfer.serving.monitoring.live_page import FILES, asset

KINDS = {
    "/": "text/html; charset=utf-8",
    "/page.js": "text/javascript; charset=utf-8",
    "/page.css": "text/css; charset=utf-8",
    "/dashboard.json": "application/json",
}
PAGE = [path for path in KINDS if path != "/dashboard.json"]


def text_of(path: str) -> str:
    found = asset(path)
    assert found is not None
    return found[0].decode()


@pytest.mark.parametrize("path", FILES)
def test_each_file_comes_with_its_type_and_the_policy(path):
    found = asset(path)
    assert found is not None
    body, kind, headers = found
    assert body
    assert kind == KINDS[path]
    policy = dict(headers)["Content-Security-Policy"].split("; ")
    for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src data:"):
        assert rule in policy
    assert "unsafe" not in " ".join(policy)


@pytest.mark.parametrize("path", ["/page.html", "/index.html", "", "/../page.js", "/page.js/", "/__init__.py"])
def test_no_other_path_is_a_file(path):
    assert asset(path) is None


def test_there_is_no_script_or_style_in_the_html_and_no_other_host_anywhere():
    html = text_of("/")
    assert re.findall(r"<script(?![^>]* src=)", html) == []
    assert re.findall(r"<style| style=| on\w+=", html) == []
    for path in PAGE:
        urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text_of(path))
        assert set(urls) <= {"http://www.w3.org"}, "the names of XML's namespaces alone"


def test_nothing_from_outside_becomes_html():
    script = text_of("/page.js")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in script


def test_every_element_that_the_script_asks_for_is_there():
    html, script = text_of("/"), text_of("/page.js")
    known = set(re.findall(r'id="([\w-]+)"', html))
    asked = set(re.findall(r'\bby\("([\w-]+)"\)', script)) | set(re.findall(r'(?:facts|shares)\("([\w-]+)"', script))
    assert asked <= known
    assert set(re.findall(r'aria-labelledby="([\w-]+)"', html)) <= known
