"""What does a generative model store between two runs, and how does a graph take and return it?"""
