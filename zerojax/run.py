"""Several processes: how they start, share the data, print once, and continue or end together."""

from zerojax._loss.batch import process_slice
from zerojax._run.elastic import elastic
from zerojax._run.processes import Watchdog, initialize, log

__all__ = ["Watchdog", "elastic", "initialize", "log", "process_slice"]
