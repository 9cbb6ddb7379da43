"""What all pictures share: matplotlib where it is installed, and colours that print in grey."""

import pathlib
from typing import Any

WIDTH = 8.0  # inches: what notebooks show without scaling


def pyplot() -> Any:
    """matplotlib.pyplot, which is not a dependency."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib. Run: pip install matplotlib") from None
    return plt


def check_picture(path: str) -> None:
    """Raises where no picture could be written to `path`: before the work that it would show."""
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    name = pathlib.Path(path)
    if name.suffix and name.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"{path} is no name of a picture. End it in .png, .pdf or .svg.")
    if not name.absolute().parent.is_dir():
        raise ValueError(f"there is no directory for {path}. Make it, or name another.")


def finished(figure: Any, path: str | None) -> Any:
    """The figure, written to `path` where one is given.

    Notebooks draw a figure that a cell returns, and once more if pyplot still lists it.
    """
    plt = pyplot()
    if path is not None:
        figure.savefig(path, dpi=150)
    if "inline" in plt.get_backend():
        plt.close(figure)
    return figure
