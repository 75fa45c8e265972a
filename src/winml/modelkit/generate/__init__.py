"""How is a built model called?"""
