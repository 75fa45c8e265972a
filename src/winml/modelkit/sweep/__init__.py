"""Sweep of many models and configurations, each pair in a separate process with limits."""
