"""The types that signatures speak of, where JAX has no name for them."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any  # arrays, or what stands for them, in nested containers
