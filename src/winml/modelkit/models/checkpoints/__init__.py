"""Where is a checkpoint, and what do its files contain?"""
