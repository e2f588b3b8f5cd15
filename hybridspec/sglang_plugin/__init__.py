"""HYBRIDSPEC inside SGLang 0.5.16: what the entry point `sglang.srt.plugins` loads.

Importing this package imports neither torch nor SGLang; submodules do.
"""
