"""How is a verb called from a shell?

Finds the command of a verb in its subject and imports it when the verb is called. Contains shared options, streams,
progress, and the conversion of errors into messages and exit codes.
"""
