"""The version number, in a file without imports."""

__version__ = "0.2.0"
