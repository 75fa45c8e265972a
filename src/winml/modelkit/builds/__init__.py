"""Builds: the stages from a checkpoint to deployable files, and which of them are up to date."""
