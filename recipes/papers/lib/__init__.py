"""Machinery of the papers' programs; it builds on `recipes/lib`, which knows nothing of it."""
