"""Narrower attention heads and FFN blocks."""
