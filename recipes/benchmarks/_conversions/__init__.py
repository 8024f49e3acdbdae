"""The conversions that `convert_models.py` measures, one file each: `add_options` and `run`."""
