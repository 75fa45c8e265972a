"""In which formats of few bits are checkpoints published, and how are their codes read?"""
