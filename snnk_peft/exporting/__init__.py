"""Exporting: a bundle becomes one file that runs without its model's code, checked before it gets its name."""
