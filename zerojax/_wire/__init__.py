"""Numbers in few bits: stochastic rounding, codecs for the wire, sums of what comes as codes."""
