"""What does ``winml quantize`` do, from file to file?"""
