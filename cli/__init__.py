"""The command line, installed as dlm_bridge.cli."""
