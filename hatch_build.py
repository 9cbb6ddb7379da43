"""The part of the metadata that depends on the repository's address.

pyproject.toml says it. Where it says none, so that a fork has no wrong one, GitHub's workflows say
where they run. A build elsewhere has no addresses, and the README's links as they are.
"""

import os
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

# In Markdown `](docs/limits.md)`, in HTML `src="docs/pictures/x.svg"`; not what has an address.
LINK = re.compile(r'(\]\(|\b(?:href|src|srcset)=")(?![a-z]+:|#|/)([^)"\s]+)')
PICTURE = re.compile(r"\.(svg|png)$")


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        with open(os.path.join(self.root, "README.md"), encoding="utf-8") as file:
            text = file.read()
        server, repository = map(os.environ.get, ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
        runs_at = f"{server}/{repository}" if server and repository else ""
        if source := self.config.get("address") or runs_at:
            tag = f"v{metadata['version']}"
            metadata["urls"] = {
                "Source": source,
                "Documentation": f"{source}/blob/{tag}/docs/index.md",
                "Changelog": f"{source}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{source}/issues",
            }
            text = with_addresses(text, source, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_addresses(text: str, source: str, tag: str) -> str:
    """Returns a README whose links lead into the repository from anywhere: from PyPI, say."""

    def address(link: re.Match[str]) -> str:
        kind = "raw" if PICTURE.search(link[2]) else "blob"
        return f"{link[1]}{source}/{kind}/{tag}/{link[2]}"

    return LINK.sub(address, text)
