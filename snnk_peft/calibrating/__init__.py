"""Calibration: check the batches, schedule the passes and fit the parts, all or nothing."""
