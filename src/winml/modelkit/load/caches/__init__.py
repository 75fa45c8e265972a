"""What does a model that generates keep between two runs, and how does a graph take and return it?"""
