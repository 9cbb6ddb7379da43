"""Draws what a program prints, as an SVG that looks like a terminal.

python examples/demo.py 2>/dev/null | python docs/pictures/terminal.py "make demo" > demo.svg
"""

import html
import sys

WIDTH, HEIGHT, LEFT, TOP = 8.4, 20, 18, 48  # of a letter, of a line, and before the first of both
BUTTONS = ("#ff5f56", "#ffbd2e", "#27c93f")


def drawn(command: str, printed: str) -> str:
    lines = [f"$ {command}", *printed.rstrip().splitlines()]
    width = 2 * LEFT + WIDTH * max(map(len, lines))
    height = TOP + HEIGHT * len(lines)
    buttons = "".join(
        f'<circle cx="{LEFT + 6 + 20 * n}" cy="20" r="6" fill="{color}"/>'
        for n, color in enumerate(BUTTONS)
    )
    texts = "".join(
        f'<text x="{LEFT}" y="{TOP + HEIGHT * n + 6}" xml:space="preserve">{line}</text>'
        for n, line in enumerate(map(html.escape, lines))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="14" '
        f'fill="#e6e6e6"><rect width="100%" height="100%" rx="8" fill="#1e1e2e"/>'
        f"{buttons}{texts}</svg>"
    )


if __name__ == "__main__":
    print(drawn(sys.argv[1], sys.stdin.read()))
