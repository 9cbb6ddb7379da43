"""What the shards of a leaf are written as on the wire, by what `Precision` says."""

import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax._kernel.places import Axes, LeafPlan
from zerojax._kernel.travel import Exact
from zerojax._plan import mesh as _mesh
from zerojax._wire.codecs import Quantized, Ways, way_of


def codec_of(leaf: LeafPlan, ways: Ways, mesh: Mesh) -> Quantized | Exact:
    """Returns the codec of a leaf's shards: exact, where they fit no blocks."""
    way = way_of(leaf.path, ways)
    if not isinstance(way, Quantized):
        return Exact(way)
    is_matrix = len(leaf.shape) - leaf.stacked >= 2
    if leaf.update.dim is None or not is_matrix or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return Exact()
    place = leaf.update.on_device
    part = place.sharding(mesh).shard_shape(place.padded(leaf.shape))
    return way.fitted(part[-1]) or Exact()


def sum_codec_of(leaf: LeafPlan, ways: Ways, mesh: Mesh, axes: Axes) -> Quantized | Exact:
    """Returns the codec of gradients that are summed over the batch's axes."""
    codec, is_float = codec_of(leaf, ways, mesh), jnp.issubdtype(leaf.dtype, jnp.floating)
    if isinstance(codec, Quantized) or not is_float or _mesh.sums_narrow(mesh, axes):
        return codec
    return Exact(jnp.promote_types(codec.dtype or leaf.dtype, jnp.float32))
