"""What `convert_models.py` converts and measures, one file each: `add_options` and `run`."""
