"""How is a whole model measured, and beside what?"""
