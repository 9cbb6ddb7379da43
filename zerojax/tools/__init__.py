"""Reads, checks and forecasts what XLA makes of a step; nothing else imports it."""
