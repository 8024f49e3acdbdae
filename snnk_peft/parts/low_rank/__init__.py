"""Products of two thin layers instead of one."""
