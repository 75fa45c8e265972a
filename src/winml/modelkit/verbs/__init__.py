"""What do the plans of several verbs share?"""
