"""What do the verbs about single modules do: extract, perf --module, perf --by-module?"""
