"""How do products and lookups compute with integers whose ranges each run finds?"""
