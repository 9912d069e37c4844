"""Entry point of the process of `dlm-bridge` and of `python -m dlm_bridge.cli`."""

import os
import signal
import sys
import threading
from typing import Any


def run() -> None:
    """Run the command line in a process that ends with its launcher, and within seconds after Ctrl-C."""
    signal.signal(signal.SIGINT, _end_at_once)  # during the first imports
    from dlm_bridge import distributed, processes, terminal

    if not set(terminal.VERBOSE_FLAGS) & set(sys.argv[1:]):
        terminal.silence_libraries()

    if distributed.launched_by_torchrun():
        processes.end_with_parent(os.getppid())
    from dlm_bridge.cli.app import main

    ended = threading.Event()
    try:
        processes.end_when_interrupted(ended.is_set)
        try:
            main()
        except SystemExit as end:
            if not end.code:
                processes.end_process_group()
            raise
    except KeyboardInterrupt:  # before or after the command
        processes.report("interrupted")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
        ended.set()
        processes.kill_children()


def _end_at_once(*_: Any) -> None:
    # Nothing can be imported here, not even `distributed.is_main`.
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"dlm-bridge: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    run()
