"""Conversion: turn data into batches; then plan, patch, calibrate, bundle and recover, with one report."""
