"""The process of `dlm-bridge` and of `python -m dlm_bridge.cli`, from its start to its end."""

import os
import signal
import threading
import warnings

from dlm_bridge import processes


def run() -> None:
    """Run the command line in a process that ends with its launcher, and soon after Ctrl-C whatever it waits for."""
    ended = threading.Event()
    processes.end_when_interrupted(lambda: None if ended.is_set() else processes.report("interrupted"))
    if processes.launched_by_torchrun():
        processes.end_with_parent(os.getppid())
    # torch says so where nvidia-resiliency-ext is installed, which brings that package.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    try:
        from dlm_bridge.cli.app import main

        main()
    except KeyboardInterrupt:  # as the command line is imported
        processes.report("interrupted")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
        ended.set()
        processes.kill_children()


if __name__ == "__main__":
    run()
