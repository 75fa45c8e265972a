"""Which variant of a model is the fastest on this machine within a quality limit?"""
