"""`serve --replicas N`: several servers of a model, each a process with its own GPU, behind one address."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "replica_router",
    extra="dlm-bridge[serve]",
    needs=("serving", "display"),
    features={"serve --replicas": "dlm_bridge.replica_router.command:serve_replicas"},
)
