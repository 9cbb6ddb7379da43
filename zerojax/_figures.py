"""The frame of every picture: matplotlib if it is installed, a width, a legend, a file."""

import pathlib
import textwrap
from typing import Any, TypeAlias

Figure: TypeAlias = Any  # of matplotlib, which is not a dependency
PlotAxes: TypeAlias = Any

INCHES = 8.0  # inches: notebooks show this without scaling
PHONE = 4.2  # inches: at the 390 pixels of a phone, text of 10 points is 13 pixels high
EXPOSED = "#8b1a1a"  # the time that a step waits for communication
SMALL = 8  # points
LONGEST_LINE = 100  # characters of a title, in the full width


def pyplot() -> PlotAxes:
    """Imports matplotlib.pyplot, or says how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib. Run: pip install matplotlib") from None
    return plt


def check_picture(path: str) -> None:
    """Raises if no picture can be written to `path`, before the work that it shows begins."""
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    name = pathlib.Path(path)
    if name.suffix and name.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"{path} does not name a picture file. End it in .png, .pdf or .svg.")
    if not name.absolute().parent.is_dir():
        raise ValueError(f"there is no directory for {path}. Make it, or name another.")


def panels(height: float, *widths: float) -> tuple[Figure, PlotAxes]:
    """Makes a figure of panels that share their rows, with these widths; one panel by default."""
    return pyplot().subplots(
        ncols=len(widths) or 1,
        figsize=(INCHES, height),
        width_ratios=widths or None,
        sharey=True,
        layout="constrained",
    )


def titled(figure: Figure, title: str, columns: int, **legend: object) -> None:
    """Adds a title above, and a legend with this number of columns below."""
    room = int(LONGEST_LINE * figure.get_figwidth() / INCHES)
    figure.suptitle(textwrap.fill(title, room), fontsize=10)
    style = {"loc": "outside lower center", "frameon": False, "fontsize": SMALL}
    figure.legend(ncols=columns, **style | legend)


def finished(figure: Figure, path: str | None) -> Figure:
    """Writes the figure to `path`, if there is one, and returns it.

    A notebook draws the figure that a cell returns, and draws it again if pyplot still lists it.
    """
    plt = pyplot()
    if path is not None:
        figure.savefig(path, dpi=150)
    if "inline" in plt.get_backend():
        plt.close(figure)
    return figure
