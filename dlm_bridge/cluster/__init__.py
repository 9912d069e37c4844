"""Clusters: a check of all hosts before a run (`env --cluster`), and copies of its data on local disks."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "cluster",
    features={
        "env --cluster": "dlm_bridge.cluster.check:check_cluster",
        "--data-cache": "dlm_bridge.cluster.staging:stage",
    },
)
