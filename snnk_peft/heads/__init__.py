"""Heads that are fitted in closed form: what they read, the statistics that decide them, what they know of errors."""
