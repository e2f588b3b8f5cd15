"""`python -m sglang.launch_server` for text: a vision stub has no image processor to load.

SGLang's command line can turn multimodal serving on but not off, hence this file.
"""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import sys


def main() -> None:
    """Serve with the flags of `sglang.launch_server`."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args(sys.argv[1:])
    arguments.enable_multimodal = False
    try:
        run_server(ServerArgs.from_cli_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
