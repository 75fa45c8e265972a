"""What does one verb do, from input path to output path?"""
