"""Which files do other tools look for in a folder, and where?"""
