"""Do two sets of outputs agree, and where do they diverge?"""
