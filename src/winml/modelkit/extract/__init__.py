"""Which modules of a model can be models of their own?"""
