"""Machinery shared by the recipes; the recipes themselves stay short enough to be read from top to bottom."""

import sys
from pathlib import Path

# A script's own folder comes first on sys.path, where recipes/evaluate.py would hide the package `evaluate` of Hugging
# Face from everything that the script imports. At the end of the path it hides nothing.
_RECIPES = str(Path(__file__).resolve().parent.parent)
if _RECIPES in sys.path:
    sys.path.remove(_RECIPES)
    sys.path.append(_RECIPES)
