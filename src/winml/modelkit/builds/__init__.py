"""What was built already, and what must be built again?"""
