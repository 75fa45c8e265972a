"""How does a built model write text, token by token?"""
