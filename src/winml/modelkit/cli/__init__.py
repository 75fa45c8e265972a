"""How is a verb called from a shell?

One file per verb, imported when its verb is typed. The only room that knows click; turns errors into words and exit
codes, once.
"""
