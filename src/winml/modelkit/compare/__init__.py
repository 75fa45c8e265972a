"""Do two models agree, and which module is the first that differs?"""
