"""Several processes that `zerojax.initialize` has joined: how they share the data, print once, and
continue or end together."""

from zerojax._loss.batch import process_slice
from zerojax._run.elastic import elastic
from zerojax._run.processes import Watchdog, log

__all__ = ["Watchdog", "elastic", "log", "process_slice"]
