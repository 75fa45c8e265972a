"""Do two answers agree, and where do they part?"""
