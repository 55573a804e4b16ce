"""Hooks of the site's build: links that leave docs/, parts of README.md, and what a page may be.

A link to a file outside of docs/ (`../benchmarks/RESULTS.md`) works in a clone, and leads to the repository on the site; a file
that does not exist is a warning. `<!-- README: NAME -->` on a line stands for the part of README.md between `<!-- NAME -->` and
`<!-- /NAME -->`. A page with more than `MOST_WORDS` words, and one that loads something from another server, are warnings.
The build is strict: a warning fails it.
"""

import logging
import os
import re
from pathlib import Path

LOG = logging.getLogger("mkdocs.hooks.graphpp")
ROOT = Path(__file__).parents[1]
MOST_WORDS = 1_500  # also of the sources, in tests/test_documents.py
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)")
_PART = re.compile(r"^<!-- README: (\w+) -->$", re.MULTILINE)
_FOREIGN = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//""")


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith("reference/"):
        page.meta.setdefault("search", {"boost": 0.01})  # guides come first: a word in a title weighs 1,000
    folder = Path("docs", page.file.src_uri).parent
    text = _PART.sub(lambda found: _of_readme(found[1]), markdown)
    return _LINK.sub(lambda found: found[1] + _target(found[2], folder, page, config), text)


def on_page_content(html, page, config, files):
    words = len(re.findall(r"\S*\w\S*", re.sub(r"<[^>]*>", " ", html)))
    if words > MOST_WORDS:
        LOG.warning("%s has %s words, %s are allowed: split the page by subject", page.file.src_uri, words, MOST_WORDS)
    return html


def on_post_page(output, page, config):
    for found in _FOREIGN.findall(output):
        LOG.warning("%s loads from another server: %s", page.file.src_uri, found)
    return output


def _of_readme(name):
    """A part of README.md, with links as from docs/index.md."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^<!-- {name} -->\n(.*?)^<!-- /{name} -->$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        LOG.warning("README.md has no part '%s'", name)
        return ""
    return _LINK.sub(lambda link: link[1] + os.path.relpath(link[2], "docs"), found[1])


def _target(target, folder, page, config):
    """The target of a link on the site: the repository's, if the file is outside of docs/."""
    path = os.path.normpath(folder / target)
    if not target.startswith("../") or path.startswith("docs/"):
        return target
    if not (ROOT / path).exists():
        LOG.warning("%s links to %s, which does not exist", page.file.src_uri, path)
    return f"{config.extra['repository']}/{path}"
