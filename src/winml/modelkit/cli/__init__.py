"""Command line: imports the command of a verb, runs it and reports its errors.

Finds the command of a verb in its subject and imports it when the verb is called. Contains shared options, streams,
progress, and the conversion of errors into messages and exit codes.
"""
