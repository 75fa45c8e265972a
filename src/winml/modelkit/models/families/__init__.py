"""Which parts does a model of the library have, and what does each of them take?"""
