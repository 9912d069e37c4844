"""Chat: a conversation in the terminal, with a local model or with one that a server has."""

from dlm_bridge.registration import Extension

EXTENSION = Extension("chat", needs=("display",), commands={"chat": "dlm_bridge.chat.command:register"})
