"""Attention heads and FFN blocks that become narrower."""
