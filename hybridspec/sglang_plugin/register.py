"""What the entry point `sglang.srt.plugins` calls, once in every process of SGLang."""

from __future__ import annotations


def register() -> None:
    """Make `--speculative-algorithm HYBRIDSPEC` known.

    SGLang logs what a plugin raises and goes on; the flag is then unknown, and the log says why.

    Raises:
        EngineRefusal: another release of SGLang than the plugin is written for.
    """
    from hybridspec.sglang_plugin.refusals import check_version, installed_version

    version = installed_version()
    if version is not None:
        check_version(version)
    from hybridspec.compat.sglang_0_5_16_algorithm import register as register_algorithm

    register_algorithm()
