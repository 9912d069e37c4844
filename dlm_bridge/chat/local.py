"""A local model as the partner of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from dlm_bridge.display.trace import LiveTrace, StoppedError, TokenStrings, live
from dlm_bridge.errors import printable
from dlm_bridge.generation.offline import check_prompts, ending_tokens, write_texts
from dlm_bridge.generation.prompts import WrittenPrompt
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.loading import LoadedModel

Message = dict[str, str]


@dataclass
class LocalModel:
    """A loaded model that answers conversations.

    Args:
        template_args: variables of the chat template.
    """

    loaded: LoadedModel
    name: str
    template_args: Mapping[str, Any]
    _trace: LiveTrace | None = field(default=None, init=False)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise SettingError for settings that the model cannot be sampled with."""
        check_prompts(self.loaded.model, [("message", [0])], settings)
        if self.loaded.diffusion:
            found = resolve_settings(self.loaded.model, None, settings, prompt_width=1)
            found.sampler.spec(SpecialTokens.of(found))

    def describe(self, settings: Mapping[str, Any]) -> str:
        """The sampler and its parameters with these settings."""
        if not self.loaded.diffusion:
            return "transformers' sampler, with the model's generation_config"
        sampler = resolve_settings(self.loaded.model, None, settings, prompt_width=1).sampler
        return f"{sampler.name}: {', '.join(f'{name}={getattr(sampler, name)}' for name in sampler.parameters())}"

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any], console: Console) -> tuple[str, str]:
        """Answer with the live view, which is replaced by the text. Returns the answer and a summary.

        Raises:
            DlmBridgeError: the conversation or a setting is refused.
            KeyboardInterrupt: `stop` was called.
        """
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        ids = WrittenPrompt(messages=tuple(messages), template_args=self.template_args).encode(tokenizer, self.name)
        check_prompts(model, [("conversation", ids)], settings)
        self._trace = trace = LiveTrace(TokenStrings(tokenizer), ids, ending_tokens(model, settings))
        try:
            with live(trace, console, begin=len(ids)):
                streamer = trace if self.loaded.diffusion else trace.token_streamer()
                result = write_texts(model, tokenizer, [ids], settings, streamer=streamer)
        except StoppedError:
            raise KeyboardInterrupt from None
        finally:
            self._trace = None
        console.print(printable(result.texts[0].strip()), markup=False, highlight=False)
        return result.texts[0], result.summary

    def stop(self) -> bool:
        """Stop the running answer after its forward pass. Returns False if it has been told before or none runs."""
        if self._trace is None or self._trace.stopped.is_set():
            return False
        self._trace.stopped.set()
        return True
