"""Which sizes are equal in a graph with open dimensions, and which computations of sizes does that make needless?"""
