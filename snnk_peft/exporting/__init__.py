"""Exporting: write a bundle as one file that runs without its model's code, verified before it gets its final name."""
