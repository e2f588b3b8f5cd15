"""Reference server: the engine behind an OpenAI-compatible HTTP interface.

For laboratories, demos and tests on one machine; it is no fleet server.
"""
