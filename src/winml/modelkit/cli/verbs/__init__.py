"""Which verbs are there? One file for each."""
