"""How do the operators of a decoder with a cache become few?"""
