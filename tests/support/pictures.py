"""Readings of a figure, its boxes and overlapping texts: tests of plots use them."""

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

matplotlib.use("agg")


def filled(figure):
    """(x, y, width, height) of every filled box of the first axes, and its colour."""
    patches = [patch for patch in figure.axes[0].patches if patch.get_fill()]
    return [
        (patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height(),
         to_hex(patch.get_facecolor()))
        for patch in patches
    ]  # fmt: skip


def overlapping(figure):
    """Pairs of texts that lie on each other, and texts that leave the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for t in figure.findobj(matplotlib.text.Text) if t.get_text() and t.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    width, height = canvas.get_width_height()
    outside = [  # numbers: matplotlib keeps, and does not draw, ticks beyond the axis
        name for name, box in boxes
        if not name.isdigit()
        and (box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1)
    ]  # fmt: skip
    pairs = [
        (one, other)
        for i, (one, a) in enumerate(boxes)
        for other, b in boxes[i + 1 :]
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 2 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2
    ]
    return outside + pairs
