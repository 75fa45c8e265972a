"""How do module tags survive a tool that drops node metadata?"""
