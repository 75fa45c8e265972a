"""Which file is the fastest on this machine that is still right?"""
