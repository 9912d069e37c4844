"""Command line of a replica, a process that ends with its router: `python -m dlm_bridge.replica_router.replica`."""

import os

ROUTER = "DLM_BRIDGE_ROUTER"  # environment variable with the router's process id


def run() -> None:
    """Run the command line. With `nproc_per_node` its processes run this module, too: they end with their launcher."""
    from dlm_bridge.processes import end_with_parent

    router = os.environ.pop(ROUTER, None)
    if router is not None:
        end_with_parent(int(router))
    from dlm_bridge.cli.__main__ import run as run_command

    run_command()


if __name__ == "__main__":
    run()
