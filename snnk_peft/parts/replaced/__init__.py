"""Replacements of a Linear and its activation, in FFN blocks and poolers."""
