"""Hooks of mkdocs, which extend pages beyond their Markdown, and find broken links."""

import json
import logging
import os
import pathlib
import posixpath
import re
import textwrap
import tomllib

import errors
import links
import packaging.version

ROOT = pathlib.Path(__file__).parents[1]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDRESS = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]
COLAB = "https://colab.research.google.com/github/"  # opens notebooks of repositories on GitHub
LOG = logging.getLogger("mkdocs.zerojax")  # under mkdocs, so that --strict fails on warnings
# Text that a page shares with the README: a link on GitHub, the text itself on the site.
INCLUDED = re.compile(r"^\[.*\]\(\.\./README\.md#.*\) <!-- README\.md:(\w+) -->$", re.MULTILINE)
# Blocks that follow one another, whose first lines say for which kind of model they are.
TAB = re.compile(
    r"^```python\n# (?P<kind>Flax nnx|TrainState)\n(?P<code>(?:(?!```).*\n)*)```\n+", re.MULTILINE
)
# On GitHub the browser's setting chooses one of two pictures; on the site a button does so too.
PICTURE = re.compile(
    r"""<picture>
  <source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>.+)">
  <img alt="(?P<alt>.+)" src="(?P<light>.+)">
</picture>"""
)
# A public name and what it does, where the site shows its whole docstring.
NAME = re.compile(r"^- `(zerojax\.[\w.]+)`: .+\n(?:  .+\n)*", re.MULTILINE)
IMAGES = r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)"
HREF = re.compile(r'(?<=href=")(?!\w+:|#|/)([^"#]+)(?=["#])')


def on_config(config):
    """Puts the version into the header and each page's title, and the site into its folder. Links
    to the repository."""
    text = (ROOT / "zerojax" / "__init__.py").read_text()
    version = re.search(r'__version__ = "(.+)"', text)[1]
    config.site_name += f" {version}"
    config.site_dir = os.path.join(config.site_dir, version)
    config.repo_url, config.repo_name = ADDRESS or None, "zerojax"


def on_page_markdown(markdown, page, **_):
    """Adds the program that a page's code continues from, the messages, pictures and tabs."""
    markdown = re.sub("<!-- messages -->", lambda _: errors.markdown(), markdown)
    markdown = markdown.replace("<this repository>", ADDRESS or "<this repository>")
    if page is not None and page.file.src_uri == "reference.md":
        markdown = NAME.sub(r"::: \1\n", markdown)
    markdown = PICTURE.sub(IMAGES, with_readme(markdown))
    first = re.search(r"^```python\n(.*?)```", markdown, flags=re.MULTILINE | re.DOTALL)
    program = with_readme(between_marks(INDEX, "program"))
    if first is not None and "import jax\n" not in first[1] and program not in markdown:
        title = '??? example "The program that this page\'s code continues from"\n\n'
        shown = title + textwrap.indent(tabbed(program), " " * 4) + "\n"
        markdown = markdown[: first.start()] + shown + markdown[first.start() :]
    return tabbed(markdown)


def with_readme(markdown):
    """Puts the README's text in place of the links to it."""
    return INCLUDED.sub(lambda link: between_marks(README, link[1]), markdown)


def between_marks(page, part):
    """Returns a part of a page, which two marks enclose."""
    return re.search(f"<!-- {part} -->\n(.*?)<!-- /{part} -->", page.read_text(), re.DOTALL)[1]


def tabbed(markdown):
    """Shows the same code for different kinds of models as tabs."""

    def tab(block):
        code = textwrap.indent(f"```python\n{block['code']}```\n", " " * 4)
        return f'=== "{block["kind"]}"\n\n{code}\n'

    return TAB.sub(tab, markdown)


def on_page_content(html, page, files, **_):
    """Turns the links of notebooks, which are paths in the repository, into links to pages, and
    puts a link to Colab before a notebook."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def to_page(link):
        path = posixpath.normpath(posixpath.join("notebooks", link[1])).removeprefix("docs/")
        file = files.get_file_from_path(path)
        if file is None:
            LOG.warning("%s links to %s, which is no page", page.file.src_uri, link[1])
            return link[1]
        return file.url_relative_to(page.file)

    html, name = HREF.sub(to_page, html), ADDRESS.partition("https://github.com/")[2]
    where = f"{COLAB}{name}/blob/main/{page.file.src_uri}"
    return f'<p><a href="{where}">Open in Colab</a></p>\n{html}' if name else html


def on_post_build(config):
    site = pathlib.Path(os.path.abspath(config.site_dir))
    list_versions(site.parent)
    for link in links.broken(site):
        LOG.warning(link)


def list_versions(folder):
    """Writes the file for the theme's menu of versions, and makes the folder open the newest."""
    found = [path.parent.name for path in folder.glob("*/index.html")]
    releases = [name for name in found if name[0].isdigit()]  # the folder may hold others
    newest_first = sorted(releases, key=packaging.version.Version, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in newest_first]
    (folder / "versions.json").write_text(json.dumps(listed))
    to_newest = f'<meta http-equiv="refresh" content="0; url={newest_first[0]}/">'
    (folder / "index.html").write_text(to_newest)
