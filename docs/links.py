"""Finds broken links and anchors in a built site: `python docs/links.py out/site`."""

import html.parser
import pathlib
import sys
import urllib.parse


class _Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links = {"", "top"}, []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name == "srcset" and value is not None:  # "a.svg, b.svg 2x"
                self.links += [one.split()[0] for one in value.split(",") if one.strip()]


def broken(site: pathlib.Path) -> list[str]:
    """Returns a line for each link inside the site whose file or anchor is missing."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site)} links to {link}: {wrong}"
        for path, page in pages.items()
        for link in dict.fromkeys(page.links)
        if (wrong := _what_is_wrong(link, path, site, pages))
    ]


def _what_is_wrong(link: str, at: pathlib.Path, site: pathlib.Path, pages: dict) -> str | None:
    parts = urllib.parse.urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = urllib.parse.unquote(parts.path)
    base = site if path.startswith("/") else at.parent
    target = base.joinpath(path.lstrip("/")).resolve() if path else at
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "there is no such file"
    if target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].anchors:
        return "there is no such anchor"
    return None


if __name__ == "__main__":
    found = broken(pathlib.Path(sys.argv[1]).resolve())
    print(*found, sep="\n")
    sys.exit(bool(found))
