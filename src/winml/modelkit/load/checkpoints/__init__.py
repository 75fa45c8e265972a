"""Where does a checkpoint lie, and what do its files say?"""
