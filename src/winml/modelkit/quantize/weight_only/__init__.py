"""How is a weight kept in few bits while everything around it stays float?"""
