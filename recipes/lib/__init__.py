"""Machinery shared by the recipes; the recipes themselves stay short enough to be read from top to bottom."""
