"""How do the tags of a graph come through a tool that drops them?"""
