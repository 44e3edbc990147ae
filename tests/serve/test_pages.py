"""Are the pages served as they should be: to anybody, with nothing inline, and with nothing from elsewhere?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from serve.web import running, token

from wise_atta.serve.app import PAGES

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in PAGES.iterdir()}


def test_pages_are_served_without_a_token_and_guarded_by_their_policy(tmp_path: Path) -> None:
    with running(tmp_path, loopback=False) as (client, service):
        token(service, "ann", "annotator")
        for path, file in (("/", "index.html"), ("/label", "label.html")):
            reply = client.get(path)
            assert reply.status_code == 200 and reply.text == TEXTS[file]
            assert "default-src 'self'" in reply.headers["content-security-policy"]
            assert "unsafe" not in reply.headers["content-security-policy"]
        for name in TEXTS:
            assert client.get(f"/pages/{name}").status_code == 200
        assert client.get("/pages/../app.py").status_code == 404
        assert client.get("/queries").status_code == 401


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".html")])
def test_pages_hold_no_script_or_style_of_their_own_and_name_files_that_exist(name: str) -> None:
    text = TEXTS[name]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", text)
    used = re.findall(r'(?:src|href)="/pages/([^"]+)"', text)
    assert used and set(used) <= set(TEXTS)
    assert '<html lang="en">' in text and 'name="viewport"' in text


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_comes_from_another_host_or_is_read_as_markup(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"^\s*//.*|\s// .*$", "", text, flags=re.MULTILINE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|@import", text)
    for other in re.findall(r'from "\./([^"]+)"', text):
        assert other in TEXTS
