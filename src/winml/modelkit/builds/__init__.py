"""Builds: the stages from a checkpoint to deployable files, and the reuse of up-to-date results."""
