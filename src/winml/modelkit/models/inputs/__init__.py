"""Which inputs does the forward take, and which values are valid?"""
