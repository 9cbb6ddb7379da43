"""How many layers a Python loop runs, by the paths of their weights."""

import pytest

from zerojax._state import hints as _hints

NESTED = {"h/{}/att/{}/w": (8, 8), "h/{}/att/{}/b": (8,)}


@pytest.mark.parametrize(
    ("shapes", "layers"),
    [
        ({p.format(i, j): NESTED[p] for p in NESTED for i in range(12) for j in range(3)}, 12),
        ({f"block_{i}/w": (8, 8 + i % 2) for i in range(6)}, 3),
        ({"blocks/w": (24, 8, 8), "h/1/w": (8, 8), "b": (3,)}, 1),
        ({"w": (24, 8, 8)}, 0),
    ],
)
def test_layers_differ_in_one_number_alone(shapes, layers):
    assert _hints.in_a_python_loop(shapes) == layers
