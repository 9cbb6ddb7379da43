"""Writes the stored results into `benchmarks/README.md`, between the marks that name them.

python benchmarks/render.py            # writes; --check fails where the page is behind
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
PAGE = HERE / "README.md"


def compiled() -> str:
    """Every compiled program, a column pair for each JAX version."""
    stored = [json.loads(path.read_text()) for path in sorted(HERE.glob("compiled_jax*.json"))]
    stored.reverse()  # the newest first
    versions = [f"{result['jax']} ({result['date']})" for result in stored]
    lines = [
        "| program | sent | peak | " + " | ".join(f"JAX {v}: step / exposed" for v in versions),
        "|---" * (3 + len(stored)),
    ]
    by_name = [{row["row"]: row for row in result["rows"]} for result in stored]
    for name, row in by_name[0].items():
        cells = [f"{row['wire_gib']:.1f} GiB", f"{row['peak_gib']:.1f} GiB"]
        found = (rows.get(name) for rows in by_name)
        cells += [f"{r['step_ms']:.0f} / {r['exposed_ms']:.1f} ms" if r else "—" for r in found]
        lines.append(" | ".join([f"| {name}", *cells]))
    return "\n".join(f"{line} |" for line in lines)


def rendered(text: str) -> str:
    mark = re.compile(r"(<!-- (\w+) -->\n).*?(\n<!-- /\2 -->)", re.DOTALL)
    return mark.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


TABLES = {"compiled": compiled}

if __name__ == "__main__":
    text = PAGE.read_text()
    if "--check" in sys.argv and rendered(text) != text:
        sys.exit(f"{PAGE.name} is behind the results. Run python benchmarks/render.py.")
    PAGE.write_text(rendered(text))
