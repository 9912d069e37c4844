"""Memory and cost of training on any layout, from metadata alone: `dlm-bridge plan` and `--dry-run`."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "plan",
    commands={"plan": "dlm_bridge.plan.command:register"},
    features={
        "--dry-run": "dlm_bridge.plan.dry_run_views:show_dry_run",
        "train --dry-run": "dlm_bridge.plan.dry_run:dry_run",
        "memory of a run": "dlm_bridge.plan.dry_run_views:describe_memory",
    },
)
