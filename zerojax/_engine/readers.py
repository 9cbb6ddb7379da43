"""Who reads what: where layers of a shard that is sliced, split or reshaped may stay shards."""

from collections.abc import Iterable

from jax.extend import core as jex_core

from zerojax._engine.ir import Atom, Kind, Shard, Var, unique
from zerojax._engine.views import views
from zerojax._jaxpr import is_var


class Readers:
    """Which equations read each variable (None: the caller), casts and constraints followed."""

    def __init__(self) -> None:
        self.readers: dict[Var, list[jex_core.JaxprEqn | None]] = {}
        self.named: dict[Var, Var] = {}  # casts of shards are the shards

    def find(self, eqns: Iterable[jex_core.JaxprEqn], outvars: Iterable[Atom]) -> None:
        for eqn in eqns:
            for var in unique(self.named.get(v, v) for v in eqn.invars if is_var(v)):
                if _passes_on(eqn):
                    self.named[eqn.outvars[0]] = var
                else:
                    self.readers.setdefault(var, []).append(eqn)
        for var in filter(is_var, outvars):
            self.readers.setdefault(self.named.get(var, var), []).append(None)

    def of(self, atom: Atom) -> list[jex_core.JaxprEqn | None]:
        return self.readers.get(self.named.get(atom, atom), []) if is_var(atom) else []

    def viewed(self, eqn: jex_core.JaxprEqn, kind: Kind) -> list[Shard] | None:
        """The results as shards, where `eqn` leaves layers as they are and shards are better."""
        if not isinstance(kind, Shard) or not (found := views(eqn, kind.cut.dim)):
            return None
        if not self._is_scanned(eqn.outvars[0]) and self._is_gathered_too(
            eqn, kind, found[0].stops
        ):
            return None  # one gather, for this and for the others
        return [Shard(kind.root, kind.cut.moved(view.dims), (*kind.views, view)) for view in found]

    def _is_gathered_too(self, eqn: jex_core.JaxprEqn, kind: Shard, stops: bool) -> bool:
        """Whether what `eqn` makes a view of is read as it is, or both frozen and not, as well."""
        readers = self.of(eqn.invars[0])
        if stops and len(readers) > 1:
            return True
        return not all(reader and views(reader, kind.cut.dim) for reader in readers)

    def _is_scanned(self, var: Var) -> bool:
        readers = self.of(var)
        return bool(readers) and all(r and r.primitive.name == "scan" for r in readers)


def is_cast(eqn: jex_core.JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _passes_on(eqn: jex_core.JaxprEqn) -> bool:
    """Whether of a shard this makes a shard."""
    return is_cast(eqn) or eqn.primitive.name == "sharding_constraint"
