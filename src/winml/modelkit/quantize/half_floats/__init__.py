"""Which nodes compute in 16-bit floating point, and how do their weights get there?"""
