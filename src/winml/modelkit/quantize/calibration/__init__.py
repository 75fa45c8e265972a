"""Calibration samples, and activation statistics over them."""
