"""How is a verb called from a shell?

Finds the command of a verb, which is in its subject, and imports it when the verb is typed. Shared options, streams,
progress, and the sentence and exit code of an error.
"""
