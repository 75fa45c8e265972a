"""Samples of datasets, their preprocessing, and generated samples."""
