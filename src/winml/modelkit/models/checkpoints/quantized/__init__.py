"""In which formats are quantized checkpoints published, and how are their codes read?"""
