"""Bundling: a patched model becomes a plain, folded transformers model that can be saved, shared and loaded."""
