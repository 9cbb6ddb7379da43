"""Codecs for the wire: numbers in few bits, and their sums."""
