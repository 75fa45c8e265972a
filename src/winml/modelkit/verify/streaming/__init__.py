"""How is a model compared whose weights are not to be in memory?"""
