"""What does one verb do, from path to path?"""
